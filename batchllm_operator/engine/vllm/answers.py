"""vLLM's parameters for what a job asks, and its outputs as the engine protocol's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.answers.labels import LOGPROBS_FIELD
from batchllm_operator.answers.logprobs import TOKENS_FIELD, TOP_FIELD
from batchllm_operator.answers.reasoning import REASONING_FIELD
from batchllm_operator.answers.samples import TEXTS_FIELD
from batchllm_operator.engine.protocol import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.vllm.formats import structured_outputs
from batchllm_operator.engine.vllm.logs import one_line
from batchllm_operator.engine.vllm.reasoning import ReasoningSplitter
from batchllm_operator.spec import ResponseFormat, SamplingSpec
from batchllm_operator.spec.sections import MAX_SAMPLES
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

_ENDS: Final = ("stop", "length")
_SEEDS: Final = 1 << 64
"""Seeds are signed integers of 64 bits."""


class GeneratedAnswers:
    """Answers of a model that generates.

    Args:
        sampling: how tokens are chosen.
        job: the engine's work.
        splitter: takes reasoning and answer apart, if the job asks for it.

    Attributes:
        params: vLLM's parameters of each request.
        num_samples: vLLM's requests for each of ours.

    Raises:
        ValueError: vLLM refuses the sampling parameters.
    """

    def __init__(
        self,
        sampling: SamplingSpec,
        job: EngineJob,
        splitter: ReasoningSplitter | None = None,
        form: ResponseFormat | None = None,
    ) -> None:
        self._sampling, self._label_token_ids = sampling, job.label_token_ids
        self._splitter = splitter
        self.params = sampling_params(sampling, job.label_token_ids, form)
        if splitter is not None:
            splitter.adjust(self.params)
        self.num_samples = sampling.n

    def params_of(self, request: EngineRequest, *, hint: bool = False) -> SamplingParams:
        """vLLM's parameters of one request; each try of it has another seed.

        Args:
            hint: whether to say what our scheduler should know of it.
        """
        params = copy(self.params)  # vLLM makes a deep copy itself
        if hint:
            params.extra_args = self._hints(request).to_extra_args()
        if params.seed is not None and request.num_tries:
            # vLLM takes the seeds that follow a request's for its samples.
            seed = params.seed + request.num_tries * MAX_SAMPLES
            params.seed = (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
        return params

    def _hints(self, request: EngineRequest) -> RequestHints:
        if self.num_samples > 1:
            # All of its prompt is a prefix of its samples. What it shares with other requests is
            # found in the cache, and counted as shared with the group before.
            return RequestHints(
                group_id=request.request_idx,
                num_prefix_tokens=len(request.prompt_token_ids),
                group_size=self.num_samples,
                num_output_tokens=request.num_output_tokens,
            )
        return RequestHints(
            group_id=request.group_id,
            num_prefix_tokens=request.num_prefix_tokens,
            group_size=request.group_size,
            num_output_tokens=request.num_output_tokens,
        )

    def convert(self, request: EngineRequest, output: Any, num_cached_tokens: int) -> EngineOutput:
        """The output of a finished request."""
        ends = [completion.finish_reason for completion in output.outputs]
        if wrong := [end for end in ends if end not in _ENDS]:
            return EngineOutput.failed(request, f"vLLM ended it with {wrong[0]!r}")
        first, raw = output.outputs[0], self._raw(output.outputs)
        text = first.text
        if self._splitter is not None:
            try:
                reasoning, text = self._splitter.split(request.prompt_token_ids, first)
            # Parsers of many models, which read whatever a model writes.
            except Exception as error:  # noqa: BLE001
                return EngineOutput.failed(request, f"the reasoning parser: {one_line(error)}")
            raw[REASONING_FIELD.name] = reasoning
        return EngineOutput(
            request_idx=request.request_idx,
            text=text,
            finish_reason="length" if "length" in ends else "stop",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
            error=None,
            raw=raw,
        )

    def _raw(self, completions: Sequence[Any]) -> dict[str, Any]:
        raw: dict[str, Any] = {}
        first = completions[0]
        if self._label_token_ids:
            found = first.logprobs[0]
            raw[LOGPROBS_FIELD.name] = [found[each].logprob for each in self._label_token_ids]
        if self._sampling.n > 1:
            raw[TEXTS_FIELD.name] = [completion.text for completion in completions]
        if (num_top := self._sampling.logprobs) is not None:
            places = list(zip(first.token_ids, first.logprobs, strict=True))
            raw[TOKENS_FIELD.name] = [found[token_id].logprob for token_id, found in places]
            if num_top:
                raw[TOP_FIELD.name] = [_likeliest(found, num_top) for _, found in places]
        return raw


def _likeliest(found: Mapping[int, Any], num_top: int) -> list[dict[str, Any]]:
    """vLLM gives the token that was chosen, too, which may be none of them."""
    ranked = sorted(found.values(), key=lambda each: each.rank)[:num_top]
    return [{"token": each.decoded_token, "logprob": each.logprob} for each in ranked]


def sampling_params(
    sampling: SamplingSpec,
    label_token_ids: Sequence[int] = (),
    form: ResponseFormat | None = None,
) -> SamplingParams:
    """vLLM's sampling parameters, with finished outputs only.

    Args:
        label_token_ids: tokens whose log-probabilities it gives.
        form: what the answers have to be.
    """
    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logprob_token_ids=list(label_token_ids) or None,
        structured_outputs=structured_outputs(form),
    )
