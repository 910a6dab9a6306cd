"""vLLM's engine arguments for a spec."""

from __future__ import annotations

from typing import Any, Final, get_args

from vllm.config import lora
from vllm.platforms import current_platform

from batchllm_operator.engine.gpus import CPU_BLOCK_SIZE
from batchllm_operator.errors import SpecError
from batchllm_operator.model import find_adapters
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings
from batchllm_operator.vllm_plugin.scheduler.scheduler import BatchLLMScheduler

_SCHEDULER: Final = f"{BatchLLMScheduler.__module__}.{BatchLLMScheduler.__qualname__}"
_GPU_MAX_NUM_SEQS: Final = 1024
_MAX_GRAPH_SIZE: Final = 1024
"""Requests of the largest captured decode step; as many run at once by default."""
_MAX_LORAS: Final = 2
"""Adapters in a step: rows of the next begin while the last ones of the one before end."""
_ON_CPU: Final = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "block_size": CPU_BLOCK_SIZE,
}


def engine_args(spec: JobSpec, max_model_len: int) -> dict[str, Any]:
    """vLLM's engine arguments for a spec on this machine's platform.

    On a CPU: eager mode (compilation takes longer than a small job), 1 GiB of KV cache
    and blocks of 32 tokens, unless the spec says otherwise.

    Raises:
        SpecError: a setting is for other platforms, or vLLM doesn't take the adapters.
        ModelError: see `find_adapters`.
    """
    engine = spec.engine
    if engine.batch_invariant and not current_platform.is_cuda():
        raise SpecError(
            "engine.batch_invariant: vLLM has it for NVIDIA GPUs, and this platform is"
            f" {current_platform.device_name}; leave it out (dtype: float32 makes differences rare)"
        )
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
    args |= attention_args(spec)
    return {name: value for name, value in args.items() if value is not None} | dict(
        engine.extra_args
    )


def attention_args(spec: JobSpec) -> dict[str, Any]:
    """The arguments that choose the spec's attention.

    None on a CPU: vLLM has one backend there, which ours replaces.
    """
    if spec.engine.attention == "stock" or current_platform.is_cpu():
        return {}
    if not current_platform.is_cuda_alike():
        raise SpecError(
            "engine.attention: batchllm runs on CUDA, ROCm and CPU; on this platform take stock"
        )
    given = spec.engine.extra_args
    settings = AttentionSettings.from_additional_config(given.get("additional_config"))
    args: dict[str, Any] = {"attention_backend": "CUSTOM"}
    has_sizes = {"cudagraph_capture_sizes", "compilation_config"} & set(given)
    if settings.decode_graphs and not has_sizes:  # vLLM's own limit is 512 on most GPUs
        args["max_cudagraph_capture_size"] = _MAX_GRAPH_SIZE
    return args


def adapter_args(spec: JobSpec) -> dict[str, Any]:
    """The arguments for a job's adapters."""
    adapters = find_adapters(spec.model)
    if not adapters:
        return {}
    largest = max(adapters, key=lambda adapter: adapter.rank)
    ranks = sorted(get_args(lora.MaxLoRARanks))
    if largest.rank > ranks[-1]:
        raise SpecError(
            f"{largest.where}: has rank {largest.rank}, and vLLM takes at most {ranks[-1]}"
        )
    num_slots = min(len(adapters), _MAX_LORAS)
    if current_platform.is_cpu():
        # There vLLM adds the last slot's adapter to rows without one, so that slot stays empty.
        num_slots, given = len(adapters) + 1, spec.engine.extra_args.get("max_loras")
        if spec.model.adapter_column is not None and isinstance(given, int) and given < num_slots:
            raise SpecError(
                f"engine.extra_args: max_loras must be at least {num_slots} on a CPU, one more than"
                " there are adapters: there vLLM adds the adapter in its last slot to rows without"
                " one"
            )
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_lora_rank": next(rank for rank in ranks if rank >= largest.rank),
    }
