"""Attention of a tile's rows to a range of keys, and of partials to one result, by online softmax
(paper, Eq. 1); and a launch that does nothing but merge.

Logarithms are to the base 2: scores are multiplied by log2(e) once, and the hardware has `exp2`.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.arguments import Results
from batchllm_kernels.prefix_attention.device.tiles import IS_FIRST, read_members, read_tile

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _decode(raw, CONST: tl.constexpr):
    """Elements of the cache as operands of a matrix product.

    FP8 bits are read as a float16 with the same sign, exponent and mantissa bits. The exponents'
    biases differ, so e4m3 becomes smaller by a power of two, which the host multiplies into
    `k_scale` and `v_scale`.
    """
    if CONST.kv_format == "e4m3":
        bits = raw.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(tl.dtype(CONST.dot_dtype))
    elif CONST.kv_format == "e5m2":
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
        zero: tl.constexpr = 0.0 if CONST.kv_format == "plain" else 0
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


@triton.jit
def _merge_partial(
    output, row_max, row_sum, slot, head, mask, dims, results, CONST: tl.constexpr
):  # fmt: skip
    """Merge each row's partial in `slot` into the result so far."""
    at = slot.to(tl.int64) * (CONST.kv_heads * CONST.heads_per_kv) + head
    # Not from the L1 cache: another multiprocessor wrote it.
    lse = tl.load(results.partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    element = (lse > float("-inf"))[:, None] & (dims[None, :] < CONST.head_dim)
    partial = tl.load(
        results.partial_out + at[:, None] * CONST.head_dim + dims[None, :],
        mask=element,
        other=0.0,
        cache_modifier=".cg",
    )
    new_max = tl.maximum(row_max, lse)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(row_max - base)
    weight = tl.exp2(lse - base)
    row_sum = row_sum * shrink + weight
    output = output * shrink[:, None] + partial * weight[:, None]
    return output, new_max, row_sum


@triton.jit
def merge_unit(tile, kv_head, members, results, CONST: tl.constexpr):
    """Merge all partials of the tile's unit, for one KV head, and write the output."""
    merge_m: tl.constexpr = CONST.merge_m  # Triton 3.6 takes no attribute in a shape
    num_dims: tl.constexpr = CONST.dims
    num_stacked = tile.unit_members * tile.unit_len
    dims = tl.arange(0, num_dims)
    for first_row in range(0, num_stacked * CONST.heads_per_kv, merge_m):
        rows = first_row + tl.arange(0, merge_m)
        stacked = rows // CONST.heads_per_kv
        head = kv_head * CONST.heads_per_kv + rows % CONST.heads_per_kv
        token_in_member = tile.row_offset + stacked % tile.unit_len
        member = read_members(
            members, tile.unit_first + stacked // tile.unit_len, stacked < num_stacked
        )
        is_row = token_in_member < member.query_len
        own_slot = member.slot + token_in_member

        output = tl.zeros([merge_m, num_dims], tl.float32)
        row_max = tl.full([merge_m], float("-inf"), tl.float32)
        row_sum = tl.zeros([merge_m], tl.float32)
        for piece in range(0, tile.prefix_pieces):
            slot = tile.prefix_slot + piece * num_stacked + stacked
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, slot, head, is_row, dims, results, CONST
            )
        for piece in range(0, tl.max(member.pieces)):
            slot = own_slot + piece * member.query_len
            has_piece = is_row & (piece < member.pieces)
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, slot, head, has_piece, dims, results, CONST
            )
        output /= tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        token = member.token + token_in_member
        write_output(output, token, head, is_row, dims, results, CONST)


@triton.jit
def write_output(output, token, head, is_row, dims, results, CONST: tl.constexpr):
    """Write each row's output to its query token and head."""
    out = results.out
    out_rows = out + token.to(tl.int64) * results.stride_token + head * results.stride_head
    element = is_row[:, None] & (dims[None, :] < CONST.head_dim)
    tl.store(out_rows[:, None] + dims[None, :], output.to(out.dtype.element_ty), mask=element)


@triton.jit
def merge_kernel(
    out, header, tiles, members, partial_out, partial_lse, stride_out_token, stride_out_head,
    CONST: tl.constexpr,
):  # fmt: skip
    """Merge every unit that has partials, after a launch that doesn't."""
    results = Results(out, partial_out, partial_lse, stride_out_token, stride_out_head)
    num_items = tl.load(header) * CONST.kv_heads
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        tile = read_tile(tiles, item // CONST.kv_heads)
        if (tile.flags & IS_FIRST) != 0 and tile.slot >= 0:
            merge_unit(tile, item % CONST.kv_heads, members, results, CONST)
