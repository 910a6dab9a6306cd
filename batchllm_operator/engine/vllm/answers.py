"""vLLM's parameters for what a job asks, and its outputs as the engine protocol's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import starmap
from typing import Any, Final, Self

from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

from batchllm_operator.answers import NOTHING_PLANNED, Answers, PlannedAnswers
from batchllm_operator.answers.generated import REASONING_FIELD, RESPONSE_FIELD
from batchllm_operator.engine.protocol import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.vllm.formats import structured_outputs
from batchllm_operator.errors import SpecError, one_line
from batchllm_operator.row_error import REPETITION
from batchllm_operator.spec import JobSpec, ResponseFormat, SamplingSpec
from batchllm_operator.spec.sections import MAX_SAMPLES
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

_EARLY_ENDS: Final = ("length", REPETITION)
_SEEDS: Final = 1 << 64  # signed integers of 64 bits


class VLLMAnswers:
    """vLLM's parameters (`params`) of requests of a question, `num_samples` of its own for each of
    ours.

    Args:
        spec: the job that would ask the question alone.
        splitter: takes reasoning apart.

    Raises:
        SpecError: vLLM refuses the sampling parameters.
    """

    def __init__(
        self,
        spec: JobSpec,
        planned: PlannedAnswers = NOTHING_PLANNED,
        splitter: ReasoningSplitter | None = None,
    ) -> None:
        self._answers, self._splitter = Answers.of(spec, planned), splitter
        self.num_samples, self._responses = spec.sampling.n, None
        self.params: SamplingParams | PoolingParams
        if spec.is_pooled:
            self.params = pooling_params(spec)
            return
        try:
            if spec.request is not None:
                from batchllm_operator.engine.vllm.openai_responses import Responses

                self._responses = Responses(spec)
                params = self._responses.params
            else:
                params = sampling_params(
                    spec.sampling, planned.label_token_ids, spec.response_format
                )
        except ValueError as error:
            raise SpecError(f"sampling: vLLM refuses it: {one_line(error)}") from error
        if splitter is not None:
            splitter.adjust(params)
        self.params = params

    @classmethod
    def of_all(
        cls, spec: JobSpec, job: EngineJob, splitters: Sequence[ReasoningSplitter] = ()
    ) -> tuple[Self, ...]:
        """Those of each of a job's questions."""
        questions = spec.questions
        planned = job.answers or [NOTHING_PLANNED] * len(questions)
        split: Sequence[ReasoningSplitter | None] = splitters or [None] * len(questions)
        return tuple(starmap(cls, zip(questions, planned, split, strict=True)))

    def params_of(
        self, request: EngineRequest, *, hint: bool = False
    ) -> SamplingParams | PoolingParams:
        """vLLM's parameters of one request, on demand with hints; each try has another seed."""
        params = copy(self.params)  # vLLM makes a deep copy itself
        hints = self._hints(request).to_extra_args() if hint else None
        if isinstance(params, PoolingParams):
            params.extra_kwargs = hints
            return params
        params.extra_args = hints
        if params.seed is not None and request.num_tries:
            # vLLM takes the seeds that follow a request's for its samples.
            seed = params.seed + request.num_tries * MAX_SAMPLES
            params.seed = (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
        return params

    def _hints(self, request: EngineRequest) -> RequestHints:
        group, num_output_tokens = request.group_id, request.num_output_tokens
        if isinstance(self.params, PoolingParams):
            num_output_tokens = 1  # the prompt's last step, as for one token
        if self.num_samples == 1:
            prefix, size = request.num_prefix_tokens, request.group_size
        else:
            # All of its prompt is a prefix of its samples. What it shares with other requests is
            # found in the cache, and counted as shared with the group before.
            group, size = request.request_idx, self.num_samples
            prefix = len(request.prompt_token_ids)
        return RequestHints(group, prefix, size, num_output_tokens)

    def convert(self, request: EngineRequest, output: Any, num_cached_tokens: int) -> EngineOutput:
        """The output of a finished request."""
        is_pooled = isinstance(self.params, PoolingParams)
        completions: Sequence[Any] = () if is_pooled else output.outputs
        ends = [completion.finish_reason for completion in completions]
        if wrong := [end for end in ends if end not in ("stop", *_EARLY_ENDS)]:
            return EngineOutput.failed(request, f"vLLM ended it with {wrong[0]!r}")
        raw, text = self._answers.read(output), completions[0].text if completions else ""
        if self._splitter is not None:
            try:
                parts = self._splitter.split(request.prompt_token_ids, completions[0])
            # Parsers of many models, which read whatever a model writes.
            except Exception as error:  # noqa: BLE001
                return EngineOutput.failed(request, f"the reasoning parser: {one_line(error)}")
            raw[REASONING_FIELD.name], text = parts
        if self._responses is not None:
            reasoning = raw.get(REASONING_FIELD.name)
            raw[RESPONSE_FIELD.name] = self._responses.body(request, completions, text, reasoning)
        num_output_tokens = sum(len(completion.token_ids) for completion in completions)
        counts = (len(request.prompt_token_ids), num_cached_tokens, num_output_tokens)
        reason = next((end for end in _EARLY_ENDS if end in ends), "stop")
        asked = request.question
        return EngineOutput(request.request_idx, text, reason, *counts, None, raw, asked)


def sampling_params(
    sampling: SamplingSpec,
    label_token_ids: Sequence[int] = (),
    form: ResponseFormat | None = None,
) -> SamplingParams:
    """vLLM's sampling parameters, with finished outputs only, and the labels' log-probabilities."""
    # They have vLLM's names.
    fields = sampling.model_dump(exclude={"from_model", "stop_repetition"})
    if (limit := sampling.stop_repetition) is not None:
        fields["repetition_detection"] = RepetitionDetectionParams(limit.tokens, 1, limit.times)
    lists = {name: list(fields[name]) for name in ("stop", "stop_token_ids")}
    return SamplingParams(
        **fields | lists,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logprob_token_ids=list(label_token_ids) or None,
        structured_outputs=structured_outputs(form),
    )


def pooling_params(spec: JobSpec) -> PoolingParams:
    """vLLM's parameters for a spec's task."""
    if spec.task != "embed":
        return PoolingParams(task="classify")
    size, normalize = spec.embedding.dimensions, spec.embedding.normalize
    return PoolingParams(task="embed", dimensions=size, use_activation=normalize)


class ReasoningSplitter:
    """Takes a model's reasoning and its answer apart, as vLLM's chat server does.

    Raises:
        SpecError: the parser doesn't suit the model.
    """

    def __init__(self, spec: JobSpec, engine: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager

        config, name = engine.vllm_config.model_config, spec.model.reasoning_parser
        arguments = {"chat_template_kwargs": spec.prompt.chat_arguments, "model_config": config}
        request = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": ""}]}
        )
        try:
            kind: Any = ParserManager.get_parser(
                reasoning_parser_name=name, is_harmony=config.hf_config.model_type == "gpt_oss"
            )
            self._new_parser = partial(kind, engine.tokenizer, None, **arguments)
            self._request: Any = self._new_parser().adjust_request(request)
        # Parsers look for their tokens in the vocabulary, each with errors of its own.
        except Exception as error:
            raise SpecError(
                f"model.reasoning_parser: vLLM's {name!r} doesn't suit this model:"
                f" {one_line(error)}"
            ) from error

    def adjust(self, params: SamplingParams) -> None:
        """Keep in the text of `params` what the parser reads, such as special tokens."""
        params.skip_special_tokens = self._request.skip_special_tokens
        params.spaces_between_special_tokens = self._request.spaces_between_special_tokens

    def split(self, prompt_token_ids: list[int], completion: Any) -> tuple[str | None, str]:
        """The reasoning, if there is any, and the answer of vLLM's finished completion."""
        parser = self._new_parser()  # it has state
        if hasattr(parser, "set_prompt_token_ids"):  # since vLLM 0.28 or later
            parser.set_prompt_token_ids(prompt_token_ids)
        reasoning, answer, _ = parser.parse(
            completion.text, self._request, model_output_token_ids=completion.token_ids
        )
        return reasoning, answer or ""
