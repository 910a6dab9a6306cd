"""Writing a step's keys and values into a layer's cache."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform


def fp8_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """The dtype of an FP8 cache by vLLM's name; None if the cache isn't FP8."""
    if not kv_cache_dtype.startswith("fp8"):
        return None
    if kv_cache_dtype == "fp8_e5m2":
        return torch.float8_e5m2
    dtype: torch.dtype = current_platform.fp8_dtype()
    return dtype


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write keys and values into the cache: on a GPU by vLLM's operations, on a CPU by torch's.

    Args:
        key: [num_tokens, num_kv_heads, head_size]; tokens after the last slot are padding.
        value: like `key`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_size], any strides; uint8 for FP8.
        v_cache: like `k_cache`.
        slots: [num_slots], block * block_size + offset of each token; negative ones are skipped.
        kv_cache_dtype: vLLM's name.
        k_scale: scalar; keys are divided by it in an FP8 cache.
        v_scale: likewise for values.
    """
    if key.device.type == "cpu":
        dtype = fp8_dtype(kv_cache_dtype)
        _write(key, k_cache, slots, dtype, k_scale)
        _write(value, v_cache, slots, dtype, v_scale)
    elif current_platform.is_cuda():
        from vllm import _custom_ops as operations

        # FlashAttention's operation takes any strides and both FP8 formats, also before sm89.
        operations.reshape_and_cache_flash(
            key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale
        )
    else:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
        )

        triton_reshape_and_cache_flash(
            key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale
        )


def _write(
    rows: Tensor, cache: Tensor, slots: Tensor, fp8: torch.dtype | None, scale: Tensor
) -> None:
    rows = rows[: len(slots)]
    if fp8 is not None:
        limit = torch.finfo(fp8).max  # above it, torch gives NaN; vLLM's operations saturate
        rows = (rows.float() / scale).clamp(-limit, limit).to(fp8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    is_written = slots >= 0
    places, block_size = slots[is_written], cache.shape[1]
    cache[places // block_size, places % block_size] = rows[is_written].to(cache.dtype)
