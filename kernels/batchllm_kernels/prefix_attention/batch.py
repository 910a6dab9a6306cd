"""The input of one launch, a ragged batch of requests over a paged KV cache, and its checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128, 256)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 128
KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
"""Dtypes of an FP8 cache. Other caches have the queries' dtype."""
Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class UnsupportedError(ValueError):
    """A tensor, a shape or a setting isn't supported; the message names it."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and blocks, the same for all layers that share a step's plan.

    Raises:
        UnsupportedError: the query heads can't share the KV heads evenly.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block of the KV cache."""
    kv_bits: int = 16
    """Bits of an element of the cache: 8 for FP8, else 16 (also for float32, in tests)."""

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_q_heads, self.num_kv_heads
        _require(
            kv_heads > 0 and heads % kv_heads == 0,
            f"num_q_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})",
        )

    @property
    def heads_per_kv(self) -> int:
        """Query heads that read one KV head (1: MHA, num_q_heads: MQA)."""
        return self.num_q_heads // self.num_kv_heads

    def check_for_kernel(self) -> None:
        """Refuse shapes that the Triton kernel doesn't support (UnsupportedError); the reference
        takes any shape."""
        kv_bits, head_dim, size = self.kv_bits, self.head_dim, self.block_size
        _require(kv_bits in (8, 16), f"kv_bits is {kv_bits}, it must be 8 or 16")
        _require(head_dim in HEAD_DIMS, f"head_dim is {head_dim}, it must be one of {HEAD_DIMS}")
        _require(
            MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and size % MIN_BLOCK_SIZE == 0,
            f"block_size is {size}, it must be a multiple of {MIN_BLOCK_SIZE} between "
            f"{MIN_BLOCK_SIZE} and {MAX_BLOCK_SIZE}",
        )


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Upper bounds of all batches: buffers and grids are sized for them once."""

    max_num_requests: int
    max_num_tokens: int
    """Query tokens of a step."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's requests. All tensors are int32, on one device.

    Request r has the query tokens [query_start_loc[r], query_start_loc[r + 1]), which are the last
    of its seq_lens[r] tokens. Token n of its context lies in block block_table[r, n // block_size],
    at n % block_size. Requests without query tokens are padding and are left out.

    Raises:
        UnsupportedError: the tensors don't fit together.
    """

    query_start_loc: Tensor
    """[num_requests + 1]."""
    seq_lens: Tensor
    """[num_requests]: tokens of context, this step's included."""
    block_table: Tensor
    """[num_requests, max_num_blocks]; entries beyond a request's tokens are ignored."""

    def __post_init__(self) -> None:
        tensors = {
            "query_start_loc": (self.query_start_loc, 1),
            "seq_lens": (self.seq_lens, 1),
            "block_table": (self.block_table, 2),
        }
        for name, (tensor, num_dims) in tensors.items():
            if tensor.dtype != torch.int32 or tensor.dim() != num_dims:
                raise UnsupportedError(
                    f"{name} must be an int32 tensor of {num_dims} dimensions, "
                    f"got {tensor.dtype} of shape {list(tensor.shape)}"
                )
            if tensor.device != self.seq_lens.device:
                raise UnsupportedError(
                    f"{name} is on {tensor.device}, seq_lens on {self.seq_lens.device}"
                )
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise UnsupportedError(f"{name} must be contiguous in its last dimension")
        num_requests = self.num_requests
        if len(self.query_start_loc) != num_requests + 1 or len(self.block_table) != num_requests:
            raise UnsupportedError(
                f"seq_lens has {num_requests} requests, so query_start_loc must have "
                f"{num_requests + 1} entries (got {len(self.query_start_loc)}) and block_table "
                f"{num_requests} rows (got {len(self.block_table)})"
            )

    @property
    def num_requests(self) -> int:
        """Rows, padding included."""
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests of a batch whose block tables begin with the same blocks."""

    requests: tuple[int, ...]
    """Their rows, ascending; at least two."""
    num_tokens: int
    """Tokens of the shared prefix: whole blocks that were computed before this step."""


def check_settings(scale: float, window: int | None, soft_cap: float | None) -> None:
    """Refuse settings of a layer that aren't above 0 (UnsupportedError)."""
    _require(
        scale > 0 and (window is None or window > 0) and (soft_cap or 0) >= 0,
        f"scale ({scale}), window ({window}) and soft_cap ({soft_cap}) must be above 0",
    )


def check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    shape: AttentionShape,
    device: torch.device,
) -> None:
    """Refuse tensors of a layer that don't fit `prefix_attention` or a plan's shape and device; the
    UnsupportedError names the tensor."""
    num_heads, head_dim = shape.num_q_heads, shape.head_dim
    _require(
        q.shape[1:] == (num_heads, head_dim),
        f"q must be [num_tokens, {num_heads}, {head_dim}], got {list(q.shape)}",
    )
    _require(q.dtype in Q_DTYPES, f"q is {q.dtype}, it must be one of {Q_DTYPES}")
    sizes = (shape.block_size, shape.num_kv_heads, head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _require(
            cache.shape[1:] == sizes,
            f"{name} must be [num_blocks, {str(sizes)[1:-1]}], got {list(cache.shape)}",
        )
        _require(
            cache.dtype == k_cache.dtype and cache.dtype in (q.dtype, *KV_DTYPES),
            f"{name} is {cache.dtype}, it must be {q.dtype} like q or one of {KV_DTYPES}, and both "
            "caches the same",
        )
        _require(
            (cache.element_size() == 1) == (shape.kv_bits == 8),
            f"{name} is {cache.dtype}, the plan is for {shape.kv_bits} bits",
        )
        num_blocks = len(k_cache)
        _require(len(cache) == num_blocks, f"{name} has {len(cache)} blocks, k_cache {num_blocks}")
        _require(
            cache.stride() == k_cache.stride(),
            "k_cache and v_cache must have the same strides, they have "
            f"{k_cache.stride()} and {v_cache.stride()}",
        )
    _require(out.shape == q.shape, f"out is {list(out.shape)}, q is {list(q.shape)}")
    for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}.items():
        strides = tensor.stride()
        _require(
            strides[-1] == 1,
            f"{name} must be contiguous in its last dimension, its strides are {strides}",
        )
        _require(tensor.device == device, f"{name} is on {tensor.device}, the batch on {device}")


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise UnsupportedError(message)
