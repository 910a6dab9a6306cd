"""Prefix-shared attention, in two calls: plan a step, then attend in each layer.

    planner = StepPlanner(shape, limits, impl="triton", device=device)    # once
    plan = planner.plan(batch)                                            # once a step
    prefix_attention(q, k_cache, v_cache, plan, scale=scale, out=out)     # in every layer

An implementation never falls back to another one: it refuses what it doesn't support, and names the
constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    SharedPrefix,
    UnsupportedError,
    check_settings,
    check_tensors,
)
from batchllm_kernels.prefix_attention.config import ArchConfig, detect_arch, load_config
from batchllm_kernels.prefix_attention.grouping import find_shared_prefixes
from batchllm_kernels.prefix_attention.reference import prefix_shared_attention

if TYPE_CHECKING:
    from batchllm_kernels.prefix_attention.launch import Launches

Impl = Literal["reference", "triton"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, for every layer of one shape.

    A plan for the Triton kernel is in its planner's buffers: the planner's next `plan` replaces it.
    """

    batch: PagedBatch
    shape: AttentionShape
    prefixes: Sequence[SharedPrefix] | None
    """The groups, for the reference; the kernel's are on the device."""
    launches: Launches | None
    """Launches the kernel on the step's work; None for the reference."""


class StepPlanner:
    """Plans steps of one shape; owns the Triton kernel's work buffers.

    `impl` is "triton" (a GPU, or Triton's interpreter) or "reference" (plain torch, anywhere). All
    batches are within `limits`, their tensors on `device`. Settings are those shipped for the
    device's architecture, unless `config` gives others.

    Raises:
        UnsupportedError: the kernel doesn't support the shape, or the device has no settings.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: BatchLimits,
        *,
        impl: Impl,
        device: torch.device,
        config: ArchConfig | None = None,
    ) -> None:
        if impl not in ("reference", "triton"):
            raise UnsupportedError(f"impl is {impl!r}, it must be 'reference' or 'triton'")
        self.shape = shape
        self.limits = limits
        self.config = config or load_config(detect_arch(device))
        self._launches: Launches | None = None
        if impl == "triton":
            from batchllm_kernels.prefix_attention.launch import Launches
            from batchllm_kernels.prefix_attention.schedule import Schedule

            shape.check_for_kernel()
            self._launches = Launches(Schedule(shape, limits, self.config, device))

    def plan(self, batch: PagedBatch) -> StepPlan:
        """Group a step's requests and lay out its work.

        "triton" launches a few kernels and doesn't wait for them; "reference" runs on the host.

        Raises:
            UnsupportedError: the batch exceeds the limit of requests.
        """
        if batch.num_requests > self.limits.max_num_requests:
            raise UnsupportedError(
                f"the batch has {batch.num_requests} requests, the limit is "
                f"{self.limits.max_num_requests}"
            )
        if self._launches is not None:
            self._launches.schedule.build(batch)
            return StepPlan(batch, self.shape, None, self._launches)
        prefixes = find_shared_prefixes(batch, self.shape.block_size, self.config.gate)
        return StepPlan(batch, self.shape, prefixes, None)

    def warm_up(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Compile the kernels now, so that no step waits for a compiler.

        Runs an empty step, which changes no tensor, on those of a layer: queries of at least one
        token, with the strides and the dtype that all will have. Compiled kernels are kept in
        Triton's cache (`TRITON_CACHE_DIR`), which can be shipped in an image.

        Raises:
            UnsupportedError: a tensor isn't supported.
        """
        ints = torch.zeros(2, dtype=torch.int32, device=q.device)
        plan = self.plan(PagedBatch(ints, ints[:1], ints[:1, None]))
        settings: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
        settings["out"] = torch.empty_like(q)
        prefix_attention(q, k_cache, v_cache, plan, scale=1.0, **settings)


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: StepPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of one layer that reads every shared prefix once (paper, Sec. 4.4).

    Args:
        q: [num_tokens, num_q_heads, head_dim], float16, bfloat16 or float32. Tokens after the
            batch's last one are padding.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], of q's dtype or FP8. Any strides
            whose last is 1.
        v_cache: like `k_cache`, with the same strides (as two parts of one tensor have).
        plan: the step's.
        scale: factor on the scores, usually head_dim ** -0.5.
        window: a query at position p sees the keys (p - window, p]; None: all of [0, p].
        soft_cap: scores are soft_cap * tanh(score / soft_cap); None: as they are.
        k_scale: factor on the keys in the cache.
        v_scale: factor on the values in the cache.
        out: written and returned, contiguous in its last dimension; None: a new tensor like `q`.
            Padding rows of a given tensor don't change.

    Raises:
        UnsupportedError: a tensor or a setting isn't supported; the message names it.
    """
    check_settings(scale, window, soft_cap)
    soft_cap = soft_cap or None
    out = torch.zeros_like(q) if out is None else out
    settings: dict[str, Any] = {
        **{"scale": scale, "window": window, "soft_cap": soft_cap},
        **{"k_scale": k_scale, "v_scale": v_scale},
    }
    if plan.launches is not None:
        plan.launches.attend(q, k_cache, v_cache, plan.batch.block_table, out, **settings)
        return out
    assert plan.prefixes is not None
    check_tensors(q, k_cache, v_cache, out, plan.shape, plan.batch.seq_lens.device)
    used = q[: int(plan.batch.query_start_loc[-1])]
    result = prefix_shared_attention(used, k_cache, v_cache, plan.batch, plan.prefixes, **settings)
    out[: len(used)] = result.to(out.dtype)
    return out
