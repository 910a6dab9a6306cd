"""Launches the attention kernel; keeps what is the same for each launch of a kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, check_tensors
from batchllm_kernels.prefix_attention.config import CPU, LaunchConfig
from batchllm_kernels.prefix_attention.device.arguments import Constants
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from batchllm_kernels.prefix_attention.device.online_softmax import merge_kernel
from batchllm_kernels.prefix_attention.schedule import Schedule

_LOG2_E = math.log2(math.e)
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2: tl.float8e5,
}
_FP8_BITS = {
    torch.float8_e4m3fn: ("e4m3", 2.0**8),
    torch.float8_e4m3fnuz: ("e4m3", 2.0**7),
    torch.float8_e5m2: ("e5m2", 1.0),
}
"""How FP8 is read from its bits, and the power of two by which the result is too small."""
_FP8_NATIVE = {"sm90": {torch.float8_e4m3fn, torch.float8_e5m2}, "gfx942": {torch.float8_e4m3fnuz}}
"""Formats that an architecture converts in hardware."""


def kv_format(dtype: torch.dtype, arch: str) -> tuple[str, float]:
    """How the kernel reads a cache (`Constants.kv_format`), and a factor for its scales."""
    is_plain = dtype not in _FP8_BITS or dtype in _FP8_NATIVE.get(arch, ())
    return ("plain", 1.0) if is_plain else _FP8_BITS[dtype]


def kernel_constants(
    launch: LaunchConfig,
    shape: AttentionShape,
    arch: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    window: int | None,
    has_soft_cap: bool,
    merge_here: bool,
) -> Constants:
    """The kernels' compile-time argument."""
    dot_dtype = TRITON_DTYPES[q_dtype]
    if q_dtype == torch.bfloat16 and kv_dtype in _FP8_BITS:
        dot_dtype = tl.float16  # one instruction makes two of FP8; bfloat16 would take two more
    elif q_dtype == torch.bfloat16 and arch == CPU:
        dot_dtype = tl.float32  # Triton's interpreter multiplies bfloat16 as integers
    dims = triton.next_power_of_2(shape.head_dim)
    smallest_block_m = triton.next_power_of_2(shape.heads_per_kv)
    return Constants(
        window=window or 0,
        has_soft_cap=has_soft_cap,
        kv_format=kv_format(kv_dtype, arch)[0],
        dot_dtype=str(dot_dtype.name),
        block_size=shape.block_size,
        heads_per_kv=shape.heads_per_kv,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dims=dims,
        narrow_m=max(launch.narrow.block_m, smallest_block_m),
        narrow_n=launch.narrow.block_n,
        narrow_stages=launch.narrow.num_stages,
        wide_m=max(launch.wide.block_m, smallest_block_m),
        wide_n=launch.wide.block_n,
        wide_stages=launch.wide.num_stages,
        merge_m=max(16, 4096 // dims),
        merge_here=merge_here,
    )


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of a planner's layers, each prepared once.

    Checks and Triton's binding of arguments take longer than some kernels run. For tensors like
    those of an earlier launch, the kernel that it compiled is launched directly.
    """

    schedule: Schedule
    """The step's work, on the device."""
    _known: dict[tuple[object, ...], _Launch] = field(default_factory=dict)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """Attend in one layer, by one launch, or two if the first can't merge.

        Writes `out` and the schedule's partials. Raises an UnsupportedError that names the tensor.
        """
        # Triton compiles apart for addresses and strides that are multiples of 16. Strides are in
        # the key. Odd addresses are left to its binder.
        addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()
        aligned = (addresses | block_table.data_ptr()) % 16 == 0
        key = (
            q.dtype, q.shape[1:], q.stride(), q.device,
            k_cache.dtype, k_cache.shape, k_cache.stride(), k_cache.device,
            v_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.device,
            out.dtype, out.shape == q.shape, out.stride(), out.device,
            window, soft_cap is None, aligned,
        )  # fmt: skip
        work, launch = self.schedule, self._known.get(key)
        if launch is None:
            check_tensors(q, k_cache, v_cache, out, work.shape, work.header.device)
            arch = work.config.arch
            constants = kernel_constants(
                work.launch,
                work.shape,
                arch,
                q.dtype,
                k_cache.dtype,
                window=window,
                has_soft_cap=soft_cap is not None,
                merge_here=work.config.merge_in_launch,
            )
            factor = kv_format(k_cache.dtype, arch)[1]
            launch = _Launch(constants, factor, work.launch, (work.max_programs, 1, 1), aligned)
            self._known[key] = launch
        if launch.constants.kv_format != "plain":
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        scale *= k_scale * launch.kv_factor
        if soft_cap is None:
            scale, soft_cap = scale * _LOG2_E, 1.0
        out_token, out_head, _ = out.stride()
        launch(
            prefix_attention_kernel,
            q, k_cache, v_cache, out, block_table, work.header, work.tiles, work.members,
            work.counters, work.partial_out, work.partial_lse,
            scale, soft_cap, v_scale * launch.kv_factor, *q.stride()[:2], *k_cache.stride()[:3],
            out_token, out_head, block_table.stride(0),
        )  # fmt: skip
        if not launch.constants.merge_here:
            launch(
                merge_kernel,
                out, work.header, work.tiles, work.members,
                work.partial_out, work.partial_lse, out_token, out_head,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Launch:
    """What is the same for each launch with tensors of these shapes, strides and dtypes."""

    constants: Constants
    kv_factor: float
    config: LaunchConfig
    programs: tuple[int, int, int]
    keeps_kernel: bool
    kept: dict[str, Callable[..., None]] = field(default_factory=dict)
    """Launchers of compiled kernels."""

    def __call__(self, kernel: Any, *arguments: object) -> None:
        if kept := self.kept.get(kernel.__name__):
            kept(*arguments, self.constants)
            return
        extra: Mapping[str, int] = {}
        if kernel is prefix_attention_kernel:
            extra = {"num_stages": 1, **self.config.options}
        compiled = kernel[self.programs](
            *arguments, self.constants, num_warps=self.config.num_warps, **extra
        )
        if self.keeps_kernel and compiled is not None:  # None: interpreted
            self.kept[kernel.__name__] = compiled[self.programs]
