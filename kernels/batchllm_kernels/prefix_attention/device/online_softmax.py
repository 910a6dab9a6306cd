"""Attention of a tile's rows to a range of keys, by online softmax.

Logarithms here are to the base 2: scores are multiplied by log2(e) once, and the hardware has
`exp2`.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.arguments import (
    E4M3FN_BITS,
    E4M3FNUZ_BITS,
    E5M2_BITS,
    PLAIN,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_PLAIN = tl.constexpr(PLAIN)
_E4M3FN_BITS = tl.constexpr(E4M3FN_BITS)
_E4M3FNUZ_BITS = tl.constexpr(E4M3FNUZ_BITS)
_E5M2_BITS = tl.constexpr(E5M2_BITS)


@triton.jit
def _decode(raw, CONST: tl.constexpr):
    """Elements of the cache as operands of a matrix product.

    FP8 bits are read as a float16 with the same sign, exponent and mantissa bits. The exponents'
    biases differ, so e4m3 becomes smaller by a power of two, which the host multiplies into
    `k_scale` and `v_scale`.
    """
    if CONST.kv_format == _E4M3FN_BITS or CONST.kv_format == _E4M3FNUZ_BITS:
        bits = raw.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(tl.dtype(CONST.dot_dtype))
    elif CONST.kv_format == _E5M2_BITS:
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.dtype(CONST.dot_dtype))
    else:
        return raw.to(tl.dtype(CONST.dot_dtype))


@triton.jit
def _blocks_of(cache, keys, end, CONST: tl.constexpr):
    """The cache's blocks of the keys; block 0 from `end` on."""
    blocks = keys.to(tl.uint32) // CONST.block_size
    return tl.load(cache.block_table + blocks, mask=keys < end, other=0)


@triton.jit
def _load(cache, blocks, keys, is_key, dims, IS_MASKED: tl.constexpr, CONST: tl.constexpr):
    """(k, v) of the keys, a row for each."""
    block_at = blocks.to(tl.int64) * cache.stride_block
    at = block_at + (keys.to(tl.uint32) % CONST.block_size) * cache.stride_token
    k_rows = cache.k + at
    v_rows = cache.v + at
    if IS_MASKED or dims.shape[0] != CONST.head_dim:
        wanted = is_key[:, None] & (dims[None, :] < CONST.head_dim)
        zero: tl.constexpr = 0.0 if CONST.kv_format == _PLAIN else 0
        k = tl.load(k_rows[:, None] + dims[None, :], mask=wanted, other=zero)
        v = tl.load(v_rows[:, None] + dims[None, :], mask=wanted, other=zero)
    else:
        k = tl.load(k_rows[:, None] + dims[None, :])
        v = tl.load(v_rows[:, None] + dims[None, :])
    return _decode(k, CONST), _decode(v, CONST)


@triton.jit
def _scores(q, k, factors, CONST: tl.constexpr):
    """Scores of all rows and keys, before the mask."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factors.scale
    if CONST.has_soft_cap:
        # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|): nothing overflows.
        decay = tl.exp2(tl.abs(scores) * (-2.0 / factors.soft_cap * _LOG2_E))
        capped = factors.soft_cap * _LOG2_E * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def online_softmax_update(
    q, output, row_max, row_sum, positions, start, end, cache, factors,
    IS_MASKED: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CONST: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, end) of a context, BLOCK_N at a time.

    IS_MASKED: some rows don't see some of the keys, or the last step is partial. A step's blocks
    are looked up in the step before: loaded in their own, they would take half of the stages of
    Triton's pipeliner from the keys and values.
    """
    dims = tl.arange(0, CONST.dims)
    blocks = _blocks_of(cache, start + tl.arange(0, BLOCK_N), end, CONST)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        keys = first + tl.arange(0, BLOCK_N)
        is_key = keys < end
        k, v = _load(cache, blocks, keys, is_key, dims, IS_MASKED, CONST)
        blocks = _blocks_of(cache, keys + BLOCK_N, end, CONST)
        scores = _scores(q, k, factors, CONST)
        if IS_MASKED:
            sees = is_key[None, :] & (keys[None, :] <= positions[:, None])
            if CONST.window > 0:
                sees &= keys[None, :] > positions[:, None] - CONST.window
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
