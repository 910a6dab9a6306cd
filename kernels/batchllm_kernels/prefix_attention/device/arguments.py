"""The attention kernels' arguments, by what they describe."""

from typing import NamedTuple

import triton.language as tl


class Queries(NamedTuple):
    """A layer's queries."""

    q: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor


class Cache(NamedTuple):
    """A layer's KV cache."""

    k: tl.tensor
    v: tl.tensor
    block_table: tl.tensor
    stride_block: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor
    stride_table: tl.tensor


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
