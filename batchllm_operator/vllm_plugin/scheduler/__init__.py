"""A scheduler for vLLM that follows the plan (paper, Sec. 4.3)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchllm_operator.vllm_plugin.scheduler.scheduler import (
        BatchLLMScheduler as BatchLLMScheduler,
    )


def __getattr__(name: str) -> Any:
    """Import vLLM for the scheduler alone: hints are made where vLLM isn't installed."""
    if name != "BatchLLMScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

    return BatchLLMScheduler
