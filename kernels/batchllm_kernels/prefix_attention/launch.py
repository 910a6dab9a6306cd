"""Launches the attention kernel on tensors that `api.py` has checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape
from batchllm_kernels.prefix_attention.checks import check_tensors
from batchllm_kernels.prefix_attention.config import LaunchConfig
from batchllm_kernels.prefix_attention.device import online_softmax as formats
from batchllm_kernels.prefix_attention.device.attention import prefix_attention_kernel
from batchllm_kernels.prefix_attention.device.merging import merge_kernel
from batchllm_kernels.prefix_attention.schedule import Schedule

_LOG2_E = math.log2(math.e)
_TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2: tl.float8e5,
}
_FP8_BITS = {
    torch.float8_e4m3fn: (formats.E4M3FN_BITS, 2.0**8),
    torch.float8_e4m3fnuz: (formats.E4M3FNUZ_BITS, 2.0**7),
    torch.float8_e5m2: (formats.E5M2_BITS, 1.0),
}
"""How FP8 is read from its bits, and the power of two by which the result is too small."""
_FP8_NATIVE = {"sm90": {torch.float8_e4m3fn, torch.float8_e5m2}, "gfx942": {torch.float8_e4m3fnuz}}
"""Formats that an architecture converts in hardware."""


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for a dtype of queries or caches."""
    return _TRITON_DTYPES[dtype]


def dot_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype, *, interpreted: bool) -> tl.dtype:
    """The dtype of the operands of matrix products.

    FP8 becomes float16, of which one instruction makes two; bfloat16 would take two more. Triton's
    interpreter multiplies bfloat16 as integers.
    """
    if kv_dtype in _FP8_BITS and q_dtype == torch.bfloat16:
        return tl.float16
    return tl.float32 if interpreted and q_dtype == torch.bfloat16 else triton_dtype(q_dtype)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the kernel reads the elements of a cache."""

    code: int
    """`KV_FORMAT` of the kernel."""
    factor: float
    """Factor for the keys' and values' scales."""
    as_bits: bool
    """Whether the cache is passed as uint8."""


def kv_format(dtype: torch.dtype, arch: str) -> KVFormat:
    """The format of a cache of this dtype on an architecture."""
    if dtype not in _FP8_BITS or dtype in _FP8_NATIVE.get(arch, ()):
        return KVFormat(formats.PLAIN, 1.0, as_bits=False)
    code, factor = _FP8_BITS[dtype]
    return KVFormat(code, factor, as_bits=True)


def kernel_constants(
    launch: LaunchConfig,
    shape: AttentionShape,
    *,
    dot_dtype: tl.dtype,
    kv_code: int,
    window: int | None,
    has_soft_cap: bool,
    merge_here: bool,
) -> dict[str, object]:
    """The kernel's compile-time arguments."""
    dims = triton.next_power_of_2(shape.head_dim)
    smallest_block_m = triton.next_power_of_2(shape.heads_per_kv)
    return {
        "WINDOW": window or 0,
        "HAS_SOFT_CAP": has_soft_cap,
        "KV_FORMAT": kv_code,
        "DOT_DTYPE": dot_dtype,
        "BLOCK_SIZE": shape.block_size,
        "HEADS_PER_KV": shape.heads_per_kv,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "DIMS": dims,
        "NARROW_M": max(launch.narrow.block_m, smallest_block_m),
        "NARROW_N": launch.narrow.block_n,
        "NARROW_STAGES": launch.narrow.num_stages,
        "WIDE_M": max(launch.wide.block_m, smallest_block_m),
        "WIDE_N": launch.wide.block_n,
        "WIDE_STAGES": launch.wide.num_stages,
        "MERGE_M": max(16, 4096 // dims),
        "MERGE_HERE": merge_here,
    }


def merge_constants(constants: dict[str, object]) -> dict[str, object]:
    """The attention kernel's compile-time arguments that `merge_kernel` also has."""
    names = merge_kernel.arg_names
    return {name: value for name, value in constants.items() if name in names}


class Launches:
    """The launches of a planner's layers, each prepared once.

    Checks and Triton's binding of arguments take longer than some kernels run. For tensors like
    those of an earlier launch, the kernel that it compiled is launched directly.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Launch] = {}

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        schedule: Schedule,
        out: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """Attend in one layer, by one launch, or two if the first can't merge.

        Writes `out` and the schedule's partials.

        Raises:
            UnsupportedError: a tensor isn't supported; the message names it.
        """
        # Triton compiles apart for addresses and strides that are multiples of 16. Strides are in
        # the key. Odd addresses are left to its binder.
        addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()
        aligned = (addresses | schedule.block_table.data_ptr()) % 16 == 0
        key = (
            q.dtype, q.shape[1:], q.stride(), q.device,
            k_cache.dtype, k_cache.shape, k_cache.stride(), k_cache.device,
            v_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.device,
            out.dtype, out.shape == q.shape, out.stride(), out.device,
            window, soft_cap is None, aligned,
        )  # fmt: skip
        launch = self._known.get(key)
        if launch is None:
            check_tensors(q, k_cache, v_cache, out, schedule.shape, schedule.header.device)
            launch = self._known[key] = _Launch.prepare(
                schedule, q, k_cache, window, soft_cap, keeps_kernel=aligned
            )
        launch.run(q, k_cache, v_cache, schedule, out, scale * k_scale, soft_cap, v_scale)

    def clear(self) -> None:
        """Prepare all of them again when they come next."""
        self._known.clear()


@dataclass(frozen=True, slots=True)
class _Launch:
    """What is the same for each launch with tensors of these shapes, strides and dtypes."""

    reading: KVFormat
    constants: Mapping[str, object]
    options: Mapping[str, int]
    programs: tuple[int, int, int]
    keeps_kernel: bool
    kept: dict[str, tuple[Callable[..., None], tuple[object, ...]]]
    """Launchers of compiled kernels, with their last arguments: the constants."""

    @classmethod
    def prepare(
        cls,
        schedule: Schedule,
        q: Tensor,
        k_cache: Tensor,
        window: int | None,
        soft_cap: float | None,
        *,
        keeps_kernel: bool,
    ) -> _Launch:
        """For tensors that were checked."""
        reading = kv_format(k_cache.dtype, schedule.arch)
        constants = kernel_constants(
            schedule.launch,
            schedule.shape,
            dot_dtype=dot_dtype(q.dtype, k_cache.dtype, interpreted=q.device.type == "cpu"),
            kv_code=reading.code,
            window=window,
            has_soft_cap=soft_cap is not None,
            merge_here=schedule.merge_in_launch,
        )
        options = {"num_warps": schedule.launch.num_warps, "num_stages": 1}
        options |= schedule.launch.options
        return cls(reading, constants, options, (schedule.max_programs, 1, 1), keeps_kernel, {})

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        schedule: Schedule,
        out: Tensor,
        scale: float,
        soft_cap: float | None,
        v_scale: float,
    ) -> None:
        """`scale` includes that of the keys in the cache."""
        reading = self.reading
        if reading.as_bits:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        scale *= reading.factor
        if soft_cap is None:
            scale, soft_cap = scale * _LOG2_E, 1.0
        out_token, out_head, _ = out.stride()
        self._launch(
            prefix_attention_kernel,
            q, k_cache, v_cache, out, schedule.block_table, schedule.header, schedule.tiles,
            schedule.members, schedule.counters, schedule.partial_out, schedule.partial_lse,
            scale, soft_cap, v_scale * reading.factor, *q.stride()[:2], *k_cache.stride()[:3],
            out_token, out_head, schedule.block_table.stride(0),
        )  # fmt: skip
        if not schedule.merge_in_launch:
            self._launch(
                merge_kernel,
                out, schedule.header, schedule.tiles, schedule.members,
                schedule.partial_out, schedule.partial_lse, out_token, out_head,
            )  # fmt: skip

    def _launch(self, kernel: Any, *arguments: object) -> None:
        kept = self.kept.get(kernel.__name__)
        if kept is not None:
            launch, constants = kept
            launch(*arguments, *constants)
            return
        named = {name: self.constants[name] for name in kernel.arg_names[len(arguments) :]}
        options = self.options
        if kernel is merge_kernel:
            options = {"num_warps": options["num_warps"]}
        compiled = kernel[self.programs](*arguments, **named, **options)
        if self.keeps_kernel and compiled is not None:  # None: interpreted
            self.kept[kernel.__name__] = compiled[self.programs], tuple(named.values())
