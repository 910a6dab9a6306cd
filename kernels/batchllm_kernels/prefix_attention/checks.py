"""What a layer's tensors and settings must be, for every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, UnsupportedError

KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
"""Dtypes of an FP8 cache. Other caches have the queries' dtype."""
Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_settings(scale: float, window: int | None, soft_cap: float | None) -> None:
    """Refuse settings of a layer that have no meaning.

    Raises:
        UnsupportedError: one of them isn't above 0.
    """
    if not scale > 0 or (window is not None and window < 1) or (soft_cap and soft_cap < 0):
        raise UnsupportedError(
            f"scale ({scale}), window ({window}) and soft_cap ({soft_cap}) must be above 0"
        )


def check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    shape: AttentionShape,
    device: torch.device,
) -> None:
    """Refuse tensors of a layer that don't fit `prefix_attention` or a plan's shape and device.

    Raises:
        UnsupportedError: the message names the tensor.
    """
    if q.dim() != 3 or tuple(q.shape[1:]) != (shape.num_q_heads, shape.head_dim):
        raise UnsupportedError(
            f"q must be [num_tokens, {shape.num_q_heads}, {shape.head_dim}], got {list(q.shape)}"
        )
    if q.dtype not in Q_DTYPES:
        raise UnsupportedError(f"q is {q.dtype}, it must be one of {Q_DTYPES}")
    expected = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or tuple(cache.shape[1:]) != expected:
            raise UnsupportedError(
                f"{name} must be [num_blocks, {', '.join(map(str, expected))}], "
                f"got {list(cache.shape)}"
            )
        if cache.dtype != k_cache.dtype or cache.dtype not in (q.dtype, *KV_DTYPES):
            raise UnsupportedError(
                f"{name} is {cache.dtype}, it must be {q.dtype} like q or one of {KV_DTYPES}, "
                "and both caches the same"
            )
        if (cache.element_size() == 1) != (shape.kv_bits == 8):
            raise UnsupportedError(f"{name} is {cache.dtype}, the plan is for {shape.kv_bits} bits")
        if len(cache) != len(k_cache):
            raise UnsupportedError(f"v_cache has {len(cache)} blocks, k_cache {len(k_cache)}")
    if k_cache.stride() != v_cache.stride():
        raise UnsupportedError(
            "k_cache and v_cache must have the same strides, they have "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if out.shape != q.shape:
        raise UnsupportedError(f"out is {list(out.shape)}, q is {list(q.shape)}")
    for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}.items():
        if tensor.stride(-1) != 1:
            raise UnsupportedError(
                f"{name} must be contiguous in its last dimension, its strides are "
                f"{tensor.stride()}"
            )
        if tensor.device != device:
            raise UnsupportedError(f"{name} is on {tensor.device}, the batch on {device}")
