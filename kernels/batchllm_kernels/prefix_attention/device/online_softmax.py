"""Attention of a tile's rows to a range of keys, by online softmax.

Logarithms here are to the base 2: scores are multiplied by log2(e) once, and the hardware has
`exp2`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)

PLAIN, E4M3FN_BITS, E4M3FNUZ_BITS, E5M2_BITS = range(4)
"""Formats of KV cache elements; FP8 that the chip can't convert is passed as uint8."""
_PLAIN = tl.constexpr(PLAIN)
_E4M3FN_BITS = tl.constexpr(E4M3FN_BITS)
_E4M3FNUZ_BITS = tl.constexpr(E4M3FNUZ_BITS)
_E5M2_BITS = tl.constexpr(E5M2_BITS)


class Context(NamedTuple):
    """Keys and values of one KV head in one row of the block table."""

    block_row: tl.tensor
    k_head: tl.tensor
    v_head: tl.tensor
    stride_block: tl.tensor
    stride_token: tl.tensor


@triton.jit
def _decode(raw, KV_FORMAT: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Elements of the cache as operands of a matrix product.

    FP8 bits are read as a float16 with the same sign, exponent and mantissa bits. The exponents'
    biases differ, so e4m3 becomes smaller by a power of two, which the host multiplies into
    `k_scale` and `v_scale`.
    """
    if KV_FORMAT == _E4M3FN_BITS or KV_FORMAT == _E4M3FNUZ_BITS:
        bits = raw.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(DOT_DTYPE)
    elif KV_FORMAT == _E5M2_BITS:
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DOT_DTYPE)
    else:
        return raw.to(DOT_DTYPE)


@triton.jit
def _blocks_of(context, keys, end, BLOCK_SIZE: tl.constexpr):
    """The cache's blocks of the keys; block 0 from `end` on."""
    return tl.load(context.block_row + keys.to(tl.uint32) // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _load(
    context, blocks, keys, is_key, dims,
    IS_MASKED: tl.constexpr, KV_FORMAT: tl.constexpr, DOT_DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """(k, v) of the keys, a row for each."""
    block_at = blocks.to(tl.int64) * context.stride_block
    at = block_at + (keys.to(tl.uint32) % BLOCK_SIZE) * context.stride_token
    k_rows = context.k_head + at
    v_rows = context.v_head + at
    if IS_MASKED or dims.shape[0] != HEAD_DIM:
        wanted = is_key[:, None] & (dims[None, :] < HEAD_DIM)
        zero: tl.constexpr = 0.0 if KV_FORMAT == _PLAIN else 0
        k = tl.load(k_rows[:, None] + dims[None, :], mask=wanted, other=zero)
        v = tl.load(v_rows[:, None] + dims[None, :], mask=wanted, other=zero)
    else:
        k = tl.load(k_rows[:, None] + dims[None, :])
        v = tl.load(v_rows[:, None] + dims[None, :])
    return _decode(k, KV_FORMAT, DOT_DTYPE), _decode(v, KV_FORMAT, DOT_DTYPE)


@triton.jit
def _scores(q, k, factors, HAS_SOFT_CAP: tl.constexpr):
    """Scores of all rows and keys, before the mask."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factors.scale
    if HAS_SOFT_CAP:
        # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|): nothing overflows.
        decay = tl.exp2(tl.abs(scores) * (-2.0 / factors.soft_cap * _LOG2_E))
        capped = factors.soft_cap * _LOG2_E * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def online_softmax_update(
    q, output, row_max, row_sum, positions, start, end, context, factors,
    IS_MASKED: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, end) of a context, BLOCK_N at a time.

    IS_MASKED: some rows don't see some of the keys, or the last step is partial. A step's blocks
    are looked up in the step before: loaded in their own, they would take half of the stages of
    Triton's pipeliner from the keys and values.
    """
    dims = tl.arange(0, q.shape[1])
    blocks = _blocks_of(context, start + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        keys = first + tl.arange(0, BLOCK_N)
        is_key = keys < end
        k, v = _load(
            context, blocks, keys, is_key, dims,
            IS_MASKED, KV_FORMAT, q.dtype, BLOCK_SIZE, HEAD_DIM,
        )  # fmt: skip
        blocks = _blocks_of(context, keys + BLOCK_N, end, BLOCK_SIZE)
        scores = _scores(q, k, factors, HAS_SOFT_CAP)
        if IS_MASKED:
            sees = is_key[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                sees &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(sees, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # For a row that has seen no key yet, -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        output = output * shrink[:, None]
        output += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        row_max = new_max
    return output, row_max, row_sum
