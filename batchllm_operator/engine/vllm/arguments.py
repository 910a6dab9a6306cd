"""vLLM's engine arguments for a spec."""

from __future__ import annotations

import inspect
from typing import Any, Final

from vllm import EngineArgs, envs
from vllm.platforms import current_platform

from batchllm_operator.engine.arguments import INVARIANCE
from batchllm_operator.engine.gpus import CPU_BLOCK_SIZE
from batchllm_operator.engine.vllm.adapters import adapter_args
from batchllm_operator.engine.vllm.attention import attention_args
from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

_SCHEDULER: Final = f"{BatchLLMScheduler.__module__}.{BatchLLMScheduler.__qualname__}"
_GPU_MAX_NUM_SEQS: Final = 1024
_ON_CPU: Final = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": CPU_BLOCK_SIZE,
}


def engine_args(spec: JobSpec, max_model_len: int) -> dict[str, Any]:
    """vLLM's engine arguments for a spec on this machine's platform.

    On a CPU: eager mode (compilation takes longer than a small job), 1 GiB of KV cache
    and blocks of 32 tokens, unless the spec says otherwise.

    Args:
        spec: the job's, after `check_arguments`.
        max_model_len: most tokens of a prompt with its output.

    Raises:
        SpecError: `engine.attention` or `engine.batch_invariant` is for other platforms, or see
            `adapter_args`.
        ModelError: see `find_adapters`.
    """
    engine = spec.engine
    if engine.batch_invariant:
        _check_invariance()
    args: dict[str, Any] = {
        "model": spec.model.path,
        "revision": spec.model.revision,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": engine.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "block_size": engine.block_size,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        # vLLM knows which pooling models share prefixes.
        "enable_prefix_caching": None if spec.is_pooled else True,
        "runner": "pooling" if spec.is_pooled else None,
        **adapter_args(spec),
        "scheduler_cls": _SCHEDULER if engine.scheduler == "batchllm" else None,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        args |= {name: value for name, value in _ON_CPU.items() if args[name] is None}
        if spec.sampling.seed is not None and not spec.sampling.is_greedy:
            args["enable_chunked_prefill"] = False  # there vLLM dies of a seeded prompt in pieces
    elif engine.scheduler == "batchllm" and args["max_num_seqs"] is None:
        args["max_num_seqs"] = _GPU_MAX_NUM_SEQS  # an upper bound; memory decides
    args |= attention_args(spec, inspect.signature(EngineArgs).parameters)
    return {name: value for name, value in args.items() if value is not None} | dict(
        engine.extra_args
    )


def _check_invariance() -> None:
    """Raise SpecError if vLLM has no kernels here whose sums don't depend on the batch."""
    if INVARIANCE not in envs.environment_variables:
        raise SpecError("engine.batch_invariant: this vLLM doesn't have it; install a newer one")
    if not current_platform.is_cuda():
        raise SpecError(
            "engine.batch_invariant: vLLM has it for NVIDIA GPUs, and this platform is"
            f" {current_platform.device_name}; leave it out (dtype: float32 makes differences rare)"
        )
