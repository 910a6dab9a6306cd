"""vLLM's parameters for what a job asks, and its outputs as the engine protocol's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind

from batchllm_operator.answers import Answers
from batchllm_operator.answers.generated import REASONING_FIELD
from batchllm_operator.engine.protocol import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.engine.vllm.formats import structured_outputs
from batchllm_operator.engine.vllm.logs import one_line
from batchllm_operator.engine.vllm.reasoning import ReasoningSplitter
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec, ResponseFormat, SamplingSpec
from batchllm_operator.spec.sections import MAX_SAMPLES
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

_ENDS: Final = ("stop", "length")
_SEEDS: Final = 1 << 64
"""Seeds are signed integers of 64 bits."""
_POOLING_TASKS: Final = {"embed": "embed", "pool": "classify"}
"""vLLM's names."""


class VLLMAnswers:
    """vLLM's parameters of a job's requests, and its outputs as ours.

    Args:
        spec: the job's.
        job: the engine's work.
        splitter: takes reasoning and answer apart, if the job asks for it.

    Attributes:
        params: vLLM's parameters of each request.
        num_samples: vLLM's requests for each of ours.

    Raises:
        SpecError: vLLM refuses the sampling parameters.
    """

    def __init__(
        self, spec: JobSpec, job: EngineJob, splitter: ReasoningSplitter | None = None
    ) -> None:
        self._answers, self._splitter = Answers.of(spec, job.answers), splitter
        self.num_samples = spec.sampling.n
        self.params: SamplingParams | PoolingParams
        if spec.is_pooled:
            self.params = pooling_params(spec)
            return
        label_token_ids = job.answers.label_token_ids
        try:
            self.params = sampling_params(spec.sampling, label_token_ids, spec.response_format)
        except ValueError as error:
            raise SpecError(f"sampling: vLLM refuses it: {one_line(error)}") from error
        if splitter is not None:
            splitter.adjust(self.params)

    def params_of(
        self, request: EngineRequest, *, hint: bool = False
    ) -> SamplingParams | PoolingParams:
        """vLLM's parameters of one request; each try of it has another seed.

        Args:
            hint: whether to say what our scheduler should know of it.
        """
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
        hints = RequestHints(
            group_id=request.group_id,
            num_prefix_tokens=request.num_prefix_tokens,
            group_size=request.group_size,
            num_output_tokens=request.num_output_tokens,
        )
        if isinstance(self.params, PoolingParams):
            return replace(hints, num_output_tokens=1)  # the prompt's last step, as for one token
        if self.num_samples == 1:
            return hints
        # All of its prompt is a prefix of its samples. What it shares with other requests is found
        # in the cache, and counted as shared with the group before.
        return replace(
            hints,
            group_id=request.request_idx,
            num_prefix_tokens=len(request.prompt_token_ids),
            group_size=self.num_samples,
        )

    def convert(self, request: EngineRequest, output: Any, num_cached_tokens: int) -> EngineOutput:
        """The output of a finished request."""
        is_pooled = isinstance(self.params, PoolingParams)
        completions: Sequence[Any] = () if is_pooled else output.outputs
        ends = [completion.finish_reason for completion in completions]
        if wrong := [end for end in ends if end not in _ENDS]:
            return EngineOutput.failed(request, f"vLLM ended it with {wrong[0]!r}")
        raw, text = self._answers.read(output), completions[0].text if completions else ""
        if self._splitter is not None:
            try:
                parts = self._splitter.split(request.prompt_token_ids, completions[0])
            # Parsers of many models, which read whatever a model writes.
            except Exception as error:  # noqa: BLE001
                return EngineOutput.failed(request, f"the reasoning parser: {one_line(error)}")
            raw[REASONING_FIELD.name], text = parts
        return EngineOutput(
            request_idx=request.request_idx,
            text=text,
            finish_reason="length" if "length" in ends else "stop",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=sum(len(completion.token_ids) for completion in completions),
            error=None,
            raw=raw,
        )


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
    fields = sampling.model_dump(exclude={"from_model"})  # they have vLLM's names
    lists = {name: list(fields[name]) for name in ("stop", "stop_token_ids")}
    return SamplingParams(
        **fields | lists,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logprob_token_ids=list(label_token_ids) or None,
        structured_outputs=structured_outputs(form),
    )


def pooling_params(spec: JobSpec) -> PoolingParams:
    """vLLM's parameters for a spec's task."""
    if spec.task == "embed":
        return PoolingParams(
            task="embed",
            use_activation=spec.embedding.normalize,
            dimensions=spec.embedding.dimensions,
        )
    return PoolingParams(task="classify")


def choose_scheduler(spec: JobSpec, config: Any) -> None:
    """Leave a model without a KV cache, which ours plans, to vLLM's own scheduler.

    Args:
        config: vLLM's, which is changed.
    """
    if spec.is_pooled and config.model_config.attn_type == "encoder_only":
        config.scheduler_config.scheduler_cls = None


def check_pooling(spec: JobSpec, job: EngineJob, engine: Any) -> None:
    """Refuse what the model can't, with vLLM's reason, before the first request.

    Args:
        engine: vLLM's `LLMEngine`.

    Raises:
        SpecError: the model can't do the task or has no such dimensions, or its embeddings have
            another size than planned.
    """
    config = engine.vllm_config
    task, known = _POOLING_TASKS[spec.task], engine.get_supported_tasks()
    if task not in known:
        raise SpecError(
            f"task {spec.task}: vLLM can't on this model: it has the tasks {', '.join(known)}, not"
            f" {task}"
        )
    try:
        pooling_params(spec).verify(config.model_config)
    except ValueError as error:
        raise SpecError(f"embedding: vLLM refuses it: {error}") from error
    size = spec.embedding.dimensions or config.model_config.embedding_size
    if job.answers.embedding_size not in (None, size):
        raise SpecError(
            f"model {spec.model.path}: its embeddings have {size} numbers here, but"
            f" {job.answers.embedding_size} by the files that the plan has read"
        )
