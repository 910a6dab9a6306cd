"""What a job asks for beside one free text: a form, several samples, reasoning, probabilities."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import fakes
from batchllm_operator.answers.kind import AnswerKind, FakePrompt, PlannedAnswers
from batchllm_operator.row_error import INVALID_OUTPUT, RowError
from batchllm_operator.spec import ChoiceFormat, JobSpec, RegexFormat, matcher

TEXTS_FIELD: Final = pa.field("generated_texts", pa.list_(pa.string()))
"""All answers of a row; `generated_text` is the first of them."""
REASONING_FIELD: Final = pa.field("reasoning", pa.string())
"""Null where the model hasn't reasoned; all of the text where it was cut off before the answer."""
TOKENS_FIELD: Final = pa.field("token_logprobs", pa.list_(pa.float64()))
"""Of each token of the answer, in its order."""
_TOKEN: Final = pa.struct([("token", pa.string()), ("logprob", pa.float64())])
TOP_FIELD: Final = pa.field("top_logprobs", pa.list_(pa.list_(_TOKEN)))
"""Of the likeliest tokens in each place, the likeliest first."""
RESPONSE_FIELD: Final = pa.field("response", pa.string())
"""The body of a response of OpenAI's API, as JSON."""
MEAN_FIELD: Final = pa.field("mean_logprob", pa.float64())


class ChoiceAnswers(AnswerKind):
    """Texts that are one of some choices, or match a pattern; they have no columns of their own."""

    def __init__(self, spec: JobSpec, planned: PlannedAnswers) -> None:
        super().__init__(spec, planned)
        form = spec.response_format
        assert isinstance(form, ChoiceFormat | RegexFormat)
        self._form = form
        self._fits: Callable[[str], object]
        if isinstance(form, ChoiceFormat):
            self.counted = ("generated_text",)
            self._fits, self._reason = frozenset(form.choices).__contains__, "isn't a choice"
        else:
            self._fits = matcher(form.regex, whole=True)
            self._reason = "doesn't match the regex"

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return isinstance(spec.response_format, ChoiceFormat | RegexFormat)

    def fault(self, text: str, raw: Mapping[str, Any]) -> RowError | None:
        return None if self._fits(text) else RowError(INVALID_OUTPUT, self._reason)

    def fake_text(self, prompt: FakePrompt) -> str:
        """One of the choices; of a regex, digits."""
        digest = fakes.digest_of(prompt.token_ids)
        text = str(digest)
        if isinstance(self._form, ChoiceFormat):
            text = self._form.choices[digest % len(self._form.choices)]
        return fakes.cut(text) if prompt.is_invalid else text


class SampleAnswers(AnswerKind):
    """Several answers to one prompt: a list of texts, which parts keep as it is published."""

    raw_fields = fields = (TEXTS_FIELD,)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.sampling.n > 1

    def read(self, output: Any) -> dict[str, Any]:
        return {TEXTS_FIELD.name: [completion.text for completion in output.outputs]}

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        ids = prompt.token_ids
        prompts = [ids, *([*ids, -sample] for sample in range(1, self._spec.sampling.n))]
        texts = [fakes.fake_text(sampled, prompt.num_characters) for sampled in prompts]
        return {TEXTS_FIELD.name: texts}


class ReasoningAnswers(AnswerKind):
    """What a model thinks before its answer, apart from the text, which is the answer alone.

    vLLM's parser takes the two apart; see `ReasoningSplitter`.
    """

    raw_fields = fields = (REASONING_FIELD,)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.model.reasoning_parser is not None

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        return {REASONING_FIELD.name: "reasoning of " + fakes.fake_text(prompt.token_ids)}


class ResponseAnswers(AnswerKind):
    """Bodies of OpenAI's API, which vLLM's classes make; see `Responses`."""

    raw_fields = fields = (RESPONSE_FIELD,)

    @classmethod
    def is_asked(cls, spec: JobSpec) -> bool:
        return spec.request is not None

    def fake(self, prompt: FakePrompt) -> dict[str, Any]:
        text = fakes.fake_text(prompt.token_ids, prompt.num_characters)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "text": text, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": len(prompt.token_ids), "completion_tokens": 1}
        usage["total_tokens"] = sum(usage.values())
        is_chat = "/chat/" in json.loads(self._spec.request or "")["url"]
        body = {"id": "chatcmpl" if is_chat else "cmpl"}
        return {RESPONSE_FIELD.name: json.dumps({**body, "choices": [choice], "usage": usage})}


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
        return {MEAN_FIELD.name: mean, **{f.name: outputs[f.name] for f in self.raw_fields}}

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
