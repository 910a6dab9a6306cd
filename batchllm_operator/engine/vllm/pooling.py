"""vLLM's pooling runner: its parameters for a job, and its outputs as the engine protocol's."""

from __future__ import annotations

from copy import copy
from typing import Any, Final

from vllm import PoolingParams

from batchllm_operator.answers.vectors import VECTOR_FIELD
from batchllm_operator.engine.protocol import EngineJob, EngineOutput, EngineRequest
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints

_TASKS: Final = {"embed": "embed", "pool": "classify"}
"""vLLM's names."""


class PooledAnswers:
    """Vectors of a model that pools; as `GeneratedAnswers`.

    Attributes:
        params: vLLM's parameters of each request.
        num_samples: vLLM's requests for each of ours.
    """

    num_samples = 1

    def __init__(self, spec: JobSpec) -> None:
        self.params = pooling_params(spec)

    def params_of(self, request: EngineRequest, *, hint: bool = False) -> PoolingParams:
        """vLLM's parameters of one request.

        Args:
            hint: whether to say what our scheduler should know of it.
        """
        if not hint:
            return self.params
        hints = RequestHints(
            group_id=request.group_id,
            num_prefix_tokens=request.num_prefix_tokens,
            group_size=request.group_size,
            num_output_tokens=1,  # the prompt's last step, as for one token
        )
        params = copy(self.params)  # vLLM makes a deep copy itself
        params.extra_kwargs = hints.to_extra_args()
        return params

    def convert(self, request: EngineRequest, output: Any, num_cached_tokens: int) -> EngineOutput:
        """The output of a finished request."""
        return EngineOutput(
            request_idx=request.request_idx,
            text="",
            finish_reason="stop",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=0,
            error=None,
            raw={VECTOR_FIELD.name: output.outputs.data.float().flatten().tolist()},
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
    task, known = _TASKS[spec.task], engine.get_supported_tasks()
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
    if job.embedding_size not in (None, size):
        raise SpecError(
            f"model {spec.model.path}: its embeddings have {size} numbers here, but"
            f" {job.embedding_size} by the files that the plan has read"
        )
