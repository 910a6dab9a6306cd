"""Log-probabilities of the tokens that were generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.spec import JobSpec

TOKENS_FIELD: Final = pa.field("token_logprobs", pa.list_(pa.float64()))
"""Of each token of the answer, in its order."""
_TOKEN: Final = pa.struct([("token", pa.string()), ("logprob", pa.float64())])
TOP_FIELD: Final = pa.field("top_logprobs", pa.list_(pa.list_(_TOKEN)))
"""Of the likeliest tokens in each place, the likeliest first."""
MEAN_FIELD: Final = pa.field("mean_logprob", pa.float64())


class LogprobAnswers(AnswerKind):
    """Log-probabilities of the answer's tokens, and their mean: null for an answer without any."""

    averaged = (MEAN_FIELD.name,)

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        self._num_top = spec.sampling.logprobs or 0
        self.raw_fields = (TOKENS_FIELD, TOP_FIELD) if self._num_top else (TOKENS_FIELD,)
        self.fields = (MEAN_FIELD, *self.raw_fields)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.sampling.logprobs is not None

    def columns(self, outputs: pa.Table) -> dict[str, pa.Array]:
        tokens = outputs[TOKENS_FIELD.name].combine_chunks()
        values = pa.table({"row": pc.list_parent_indices(tokens), "value": pc.list_flatten(tokens)})
        means = values.group_by("row", use_threads=False).aggregate([("value", "mean")])
        rows = pa.array(range(len(tokens)), means["row"].type)
        mean = means["value_mean"].combine_chunks().take(pc.index_in(rows, means["row"]))
        raw = {field.name: outputs[field.name] for field in self.raw_fields}
        return {MEAN_FIELD.name: mean, **raw}

    def read(self, output: Any) -> dict[str, Any]:
        first = output.outputs[0]
        places = list(zip(first.token_ids, first.logprobs, strict=True))
        raw = {TOKENS_FIELD.name: [known[token_id].logprob for token_id, known in places]}
        if self._num_top:
            raw[TOP_FIELD.name] = [_likeliest(known, self._num_top) for _, known in places]
        return raw

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        logprobs = fakes.fake_logprobs(prompt.token_ids, self._spec.sampling.max_tokens)
        top = [{"token": f"token {rank}", "logprob": -rank / 8} for rank in range(self._num_top)]
        return {TOKENS_FIELD.name: logprobs, TOP_FIELD.name: [top for _ in logprobs]}


def _likeliest(known: Mapping[int, Any], num_top: int) -> list[dict[str, Any]]:
    """The likeliest tokens of a place; vLLM adds the chosen token, which may not be among them."""
    ranked = sorted(known.values(), key=lambda token: token.rank)[:num_top]
    return [{"token": token.decoded_token, "logprob": token.logprob} for token in ranked]
