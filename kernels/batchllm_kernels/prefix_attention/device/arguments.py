"""The attention kernels' arguments, by what they describe."""

from typing import NamedTuple

import triton.language as tl


class Constants(NamedTuple):
    """The compile-time argument, made on the host."""

    window: int
    """0: every query sees all keys before it."""
    has_soft_cap: bool
    kv_format: str
    """Of the cache's elements: "plain", or "e4m3" or "e5m2" for FP8 that the chip can't convert,
    passed as uint8."""
    dot_dtype: str
    """Triton's name for the dtype of the operands of matrix products. Triton's hooks write the
    constants as JSON, which has no dtypes."""
    block_size: int
    heads_per_kv: int
    kv_heads: int
    head_dim: int
    dims: int
    """The head size, rounded up to a power of two."""
    narrow_m: int
    narrow_n: int
    narrow_stages: int
    wide_m: int
    wide_n: int
    wide_stages: int
    merge_m: int
    """Rows that a merge handles at a time."""
    merge_here: bool
    """Whether a unit's last tile merges it, instead of a second launch."""


class Sizes(NamedTuple):
    """The compile-time argument of the kernels that lay out a step; lengths in query tokens."""

    block_size: int
    """Tokens of a block."""
    narrow_tokens: int
    wide_tokens: int
    """That fit in a tile."""
    max_degree: int
    """Larger groups count as this one for the gate."""
    requests: int
    """Most of a step, rounded up to a power of two."""
    chunk: int
    """Requests that a program of `lay_out` reads at a time."""
    piece_align: int = 128
    """Pieces of a context end at multiples of this many tokens."""


class Queries(NamedTuple):
    """A layer's queries."""

    q: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor


class Cache(NamedTuple):
    """A layer's KV cache; or keys and values of one KV head in one row of the block table."""

    k: tl.tensor
    v: tl.tensor
    block_table: tl.tensor
    stride_block: tl.tensor
    stride_token: tl.tensor


class Factors(NamedTuple):
    """Factors on scores and values."""

    scale: tl.tensor
    """Times the keys' scale, and times log2(e) unless the scores are capped first."""
    soft_cap: tl.tensor
    v_scale: tl.tensor


class Results(NamedTuple):
    """Where outputs and partials go."""

    out: tl.tensor
    partial_out: tl.tensor
    partial_lse: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor
