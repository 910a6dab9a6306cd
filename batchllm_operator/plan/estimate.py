"""The spec's GPU, by whose time shards are balanced; what the plan costs on it, for the user."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from batchllm_operator.cost import (
    GPU,
    EngineLimits,
    ModelShape,
    Work,
    WorkArrays,
    find_gpu,
    model_shape,
    predict,
    rates,
)
from batchllm_operator.errors import ModelError, PlanError
from batchllm_operator.model import ModelFiles
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import CostEstimate

_log = logging.getLogger(__name__)
_MAX_NUM_SEQS: Final = 1024  # vLLM's own for large GPUs
_MAX_NUM_BATCHED_TOKENS: Final = 8192
_ROOM: Final = 1.25  # memory per byte of weights, which leaves some for KV


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU, model and engine limits of the estimate."""

    gpu: GPU
    model: ModelShape
    limits: EngineLimits
    """The spec's limits, for the estimate only."""

    @property
    def balance_limits(self) -> EngineLimits:
        """The smallest usual engine that the model fits, without the spec's tuning.

        Shards are part of a plan, and tuning must not change them.
        """
        bytes_per_gpu, num_gpus = self.gpu.memory_bytes * self.gpu.achievable_memory, 1
        while bytes_per_gpu * num_gpus < _ROOM * self.model.weight_bytes:
            num_gpus *= 2
        return EngineLimits(num_gpus=num_gpus)


def find_target(spec: JobSpec) -> Target | None:
    """The GPU that the spec names, with the shape of its model.

    None if the spec names no GPU or has no model (the fake engine), or, with a note in the log, if
    the model's `config.json` can't be read or describes an unknown shape.

    Raises `SpecError`: the table of GPUs is broken, or lacks the GPU.
    """
    if spec.planner.target_gpu is None:
        return None
    table = spec.planner.gpu_table
    gpu = find_gpu(spec.planner.target_gpu, Path(table) if table else None)
    if spec.engine.backend == "fake":
        return None
    try:
        return Target(gpu, shape_of(spec), engine_limits(spec))
    except ModelError as error:
        _log.info("GPU time isn't predicted: %s", error)
        return None


def estimate_work(
    target: Target, works: Sequence[Work], unshared: Work, num_replicas: int
) -> tuple[CostEstimate | None, Sequence[float | None]]:
    """GPU time and price of the plan, and each shard's part of the GPU seconds.

    Nothing but None, with a note in the log, if the model doesn't fit.

    Args:
        works: the work of each shard, without what its requests find in the cache.
        unshared: the work of all rows, if each row's prompt were computed alone.
        num_replicas: engines that share a shard.
    """
    total = sum(works, Work())
    machine = (target.model, target.gpu, target.limits)
    num_engines = len(works) * num_replicas
    try:
        planned = predict(total, *machine, num_engines=num_engines)
        alone = predict(unshared, *machine, num_engines=num_engines)
    except PlanError as error:
        _log.info("GPU time isn't predicted: %s", error)
        return None, [None] * len(works)
    figures = {name: rounded(value) for name, value in asdict(planned).items()}
    figures["attention_bytes"] = planned.attention_bytes
    estimate = CostEstimate(
        **figures,
        gpu=target.gpu,
        model=target.model,
        num_saved_tokens=unshared.num_prefill_tokens - total.num_prefill_tokens,
        num_output_tokens=total.num_decode_tokens,
        unshared_gpu_s=rounded(alone.gpu_s),
        unshared_cost_usd=rounded(alone.cost_usd),
        assumptions=_assumptions(target, total),
    )
    # Rates add up to the whole except for the ramp, one per engine.
    rate = rates(total, *machine)
    ramp_s = total.max_output_tokens * num_replicas * rate.s_per_ramp_step
    counts = np.array([astuple(work)[:-1] for work in works], dtype=np.int64).reshape(-1, 5)
    parts = WorkArrays(*counts.T).nanoseconds(rate) / 1e9 + ramp_s
    return estimate, (parts / (parts.sum() or 1.0) * estimate.gpu_s).tolist()


def _assumptions(target: Target, total: Work) -> tuple[str, ...]:
    gpu, model, limits = target.gpu, target.model, target.limits
    share = limits.memory_share or gpu.achievable_memory
    kv = f"{share:.0%} of {gpu.memory_bytes / 2**30:,.0f} GiB for weights and KV"
    if limits.kv_cache_bytes is not None:
        kv = f"{limits.kv_cache_bytes / 2**30:,.1f} GiB for KV"
    outputs = "no decode steps"
    if total.num_decode_tokens:
        outputs = (
            f"{total.num_decode_tokens:,} output tokens, at most {total.max_output_tokens:,} each"
        )
    return (
        f"{outputs};"
        f" {model.num_parameters / 1e9:,.3g} B parameters in {model.bytes_per_weight:g} bytes,"
        f" {model.kv_bytes_per_token:,.0f} bytes of KV a token",
        f"{gpu.achievable_compute:.0%} of {gpu.bf16_flop_per_s / 1e12:,.0f} bf16 TFLOP/s,"
        f" {gpu.achievable_bandwidth:.0%} of {gpu.hbm_bytes_per_s / 1e12:,.3g} TB/s, {kv},"
        f" ${gpu.usd_per_hour:,.2f} an hour",
        "a roofline, not measured: without starting the engine, preemption, and traffic between"
        " GPUs; each request reads the KV of its shared prefix by itself; step by step:"
        " `batchllm simulate --plan`",
    )


def shape_of(spec: JobSpec) -> ModelShape:
    """The shape of the spec's model, with the engine's types; raises as `read_shape`."""
    extra, is_32_bit = spec.engine.extra_args, spec.engine.dtype == "float32"
    per_weight = 1.0 if extra.get("quantization") == "fp8" else 4.0 if is_32_bit else None
    has_fp8_kv = str(extra.get("kv_cache_dtype")).startswith("fp8")
    return read_shape(
        spec.model.path,
        spec.model.revision,
        bytes_per_weight=per_weight,
        bytes_per_kv_element=1.0 if has_fp8_kv else 4.0 if is_32_bit else 2.0,
    )


def read_shape(path: str, revision: str | None = None, **element_bytes: Any) -> ModelShape:
    """The shape of the model in a folder or on the hub; `element_bytes` are those of `model_shape`.

    Raises `ModelError`: its `config.json` can't be read, or it isn't of a kind that is known.
    """
    config = ModelFiles(path, revision).read_json("config.json")
    if not isinstance(config, dict):
        raise ModelError(f"model {path}: has no config.json")
    return model_shape(config, path, **element_bytes)


def engine_limits(spec: JobSpec) -> EngineLimits:
    """The spec's limits, with vLLM's defaults."""
    engine = spec.engine
    return EngineLimits(
        num_gpus=engine.tensor_parallel_size,
        memory_share=engine.gpu_memory_utilization,
        kv_cache_bytes=engine.kv_cache_memory_bytes,
        max_num_seqs=engine.max_num_seqs or _MAX_NUM_SEQS,
        max_num_batched_tokens=engine.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS,
        spreads_prefill=engine.scheduler == "batchllm",
    )


def rounded(value: float) -> float:
    """Rounded to six digits: enough for a prediction, and equal on all machines."""
    return float(f"{value:.6g}")
