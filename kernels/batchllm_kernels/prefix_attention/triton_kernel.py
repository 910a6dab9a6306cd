"""The fused kernel: prefix tiles and own tiles of a step in one launch, with their merge.

Paper, Sec. 4.4: the partial attention over shared prefixes (matrix-matrix) and over each request's
own part run in different programs of one kernel, with their own tilings. The program that finishes
a unit's last tile merges the unit's partials by online softmax (Eq. 1); if a chip doesn't order
memory well enough for that, `merge_kernel` follows. `tiles.py` describes the work, which
`schedule_kernels.py` writes.

Logarithms here are to the base 2: scores are multiplied by log2(e) once, and the hardware has
`exp2`.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.tile_constants import (
    HEADER_TILES,
    IS_FIRST,
    IS_WIDE,
    MEMBER_FIELDS,
    MEMBER_LEN,
    MEMBER_PIECES,
    MEMBER_POSITION,
    MEMBER_SLOT,
    MEMBER_TOKEN,
    TILE_BLOCK_ROW,
    TILE_COUNTER,
    TILE_FIELDS,
    TILE_FLAGS,
    TILE_KV_END,
    TILE_KV_START,
    TILE_NUM_PARTIALS,
    TILE_PREFIX_PIECES,
    TILE_PREFIX_SLOT,
    TILE_ROW_OFFSET,
    TILE_ROWS_FIRST,
    TILE_ROWS_LEN,
    TILE_ROWS_MEMBERS,
    TILE_SLOT,
    TILE_UNIT_FIRST,
    TILE_UNIT_LEN,
    TILE_UNIT_MEMBERS,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(2**30)
"""Position of rows without a query: they see every key, and their results aren't used."""

PLAIN, E4M3FN_BITS, E4M3FNUZ_BITS, E5M2_BITS = range(4)
"""Formats of KV cache elements; FP8 that the chip can't convert is passed as uint8."""
_PLAIN = tl.constexpr(PLAIN)
_E4M3FN_BITS = tl.constexpr(E4M3FN_BITS)
_E4M3FNUZ_BITS = tl.constexpr(E4M3FNUZ_BITS)
_E5M2_BITS = tl.constexpr(E5M2_BITS)


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
def _online_softmax_update(
    q,
    output,
    row_max,
    row_sum,
    positions,
    start,
    end,
    block_row,
    k_head,
    v_head,
    stride_kv_block,
    stride_kv_token,
    scale,
    soft_cap,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the keys [start, end), BLOCK_N at a time.

    IS_MASKED: some rows don't see some of the keys, or the last step is partial.
    """
    dims = tl.arange(0, DIMS)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        keys = first + tl.arange(0, BLOCK_N)
        is_key = keys < end
        unsigned = keys.to(tl.uint32)
        if IS_MASKED:
            blocks = tl.load(block_row + unsigned // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(block_row + unsigned // BLOCK_SIZE)
        at = blocks.to(tl.int64) * stride_kv_block + (unsigned % BLOCK_SIZE) * stride_kv_token
        k_rows = k_head + at
        v_rows = v_head + at
        if IS_MASKED or DIMS != HEAD_DIM:
            wanted = is_key[:, None] & (dims[None, :] < HEAD_DIM)
            zero: tl.constexpr = 0.0 if KV_FORMAT == _PLAIN else 0
            k = tl.load(k_rows[:, None] + dims[None, :], mask=wanted, other=zero)
            v = tl.load(v_rows[:, None] + dims[None, :], mask=wanted, other=zero)
        else:
            k = tl.load(k_rows[:, None] + dims[None, :])
            v = tl.load(v_rows[:, None] + dims[None, :])
        k = _decode(k, KV_FORMAT, DOT_DTYPE)
        v = _decode(v, KV_FORMAT, DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|): nothing overflows.
            decay = tl.exp2(tl.abs(scores) * (-2.0 / soft_cap * _LOG2_E))
            capped = soft_cap * _LOG2_E * (1.0 - decay) / (1.0 + decay)
            scores = tl.where(scores < 0, -capped, capped)
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
        output += tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        row_max = new_max
    return output, row_max, row_sum


@triton.jit
def _attend_tile(
    tile,
    kv_head,
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    members,
    partial_out,
    partial_lse,
    scale,
    soft_cap,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_kv_block,
    stride_kv_token,
    stride_kv_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    SPLIT_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile for one KV head: writes the output if it is the unit's only one, else its slots.

    SPLIT_MASKED: run steps that all rows see entirely in a loop without masks.
    """
    kv_start = tl.load(tile + TILE_KV_START)
    kv_end = tl.load(tile + TILE_KV_END)
    rows_len = tl.load(tile + TILE_ROWS_LEN)
    slot = tl.load(tile + TILE_SLOT)
    row_offset = tl.load(tile + TILE_ROW_OFFSET)
    block_row = block_table + tl.load(tile + TILE_BLOCK_ROW).to(tl.int64) * stride_table

    rows = tl.arange(0, BLOCK_M)
    stacked = rows // HEADS_PER_KV
    head = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    member = stacked // rows_len
    is_row = member < tl.load(tile + TILE_ROWS_MEMBERS)
    token_in_member = row_offset + stacked % rows_len
    record = members + (tl.load(tile + TILE_ROWS_FIRST) + member) * MEMBER_FIELDS
    is_row &= token_in_member < tl.load(record + MEMBER_LEN, mask=is_row, other=0)
    token = tl.load(record + MEMBER_TOKEN, mask=is_row, other=0) + token_in_member
    position = tl.load(record + MEMBER_POSITION, mask=is_row, other=0) + token_in_member
    position = tl.where(is_row, position, _FAR)

    dims = tl.arange(0, DIMS)
    element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    q_rows = q + token.to(tl.int64) * stride_q_token + head * stride_q_head
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=element, other=0.0).to(DOT_DTYPE)
    k_head = k_cache + kv_head.to(tl.int64) * stride_kv_head
    v_head = v_cache + kv_head.to(tl.int64) * stride_kv_head

    output = tl.zeros([BLOCK_M, DIMS], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    start = kv_start
    if WINDOW > 0:
        start = tl.maximum(start, tl.min(position) - WINDOW + 1)
    if SPLIT_MASKED and WINDOW == 0:
        seen_by_all = tl.minimum(kv_end, tl.min(position) + 1)
        whole = tl.maximum(seen_by_all - start, 0) // BLOCK_N * BLOCK_N
        output, row_max, row_sum = _online_softmax_update(
            queries, output, row_max, row_sum, position, start, start + whole,
            block_row, k_head, v_head,
            stride_kv_block, stride_kv_token, scale, soft_cap,
            False, WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE,
            BLOCK_SIZE, HEAD_DIM, DIMS, BLOCK_N, STAGES,
        )  # fmt: skip
        start += whole
    output, row_max, row_sum = _online_softmax_update(
        queries, output, row_max, row_sum, position, start, kv_end,
        block_row, k_head, v_head,
        stride_kv_block, stride_kv_token, scale, soft_cap,
        True, WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE,
        BLOCK_SIZE, HEAD_DIM, DIMS, BLOCK_N, STAGES,
    )  # fmt: skip

    output *= (v_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    if slot < 0:
        out_rows = out + token.to(tl.int64) * stride_out_token + head * stride_out_head
        tl.store(out_rows[:, None] + dims[None, :], output.to(out.dtype.element_ty), mask=element)
    else:
        # A row that saw no key has row_max = -inf.
        lse = row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))
        first_slot = slot.to(tl.int64) * (KV_HEADS * HEADS_PER_KV)
        at = stacked * (KV_HEADS * HEADS_PER_KV) + head
        tl.store(partial_lse + first_slot + at, lse, mask=is_row)
        partial_rows = partial_out + first_slot * HEAD_DIM + at[:, None] * HEAD_DIM
        tl.store(partial_rows + dims[None, :], output, mask=element)


@triton.jit
def _merge_partial(
    output, row_max, row_sum, slot, head, mask, partial_out, partial_lse,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Merge each row's partial in `slot` into the result so far."""
    dims = tl.arange(0, DIMS)
    at = slot.to(tl.int64) * HEADS + head
    # Not from the L1 cache: another multiprocessor wrote it.
    lse = tl.load(partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    element = (lse > float("-inf"))[:, None] & (dims[None, :] < HEAD_DIM)
    partial = tl.load(
        partial_out + at[:, None] * HEAD_DIM + dims[None, :],
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
def _merge_unit(
    tile,
    kv_head,
    out,
    members,
    partial_out,
    partial_lse,
    stride_out_token,
    stride_out_head,
    HEADS_PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    """Merge all partials of a tile's unit for one KV head, and write the output (Eq. 1)."""
    unit_members = tl.load(tile + TILE_UNIT_MEMBERS)
    unit_len = tl.load(tile + TILE_UNIT_LEN)
    first = tl.load(tile + TILE_UNIT_FIRST)
    row_offset = tl.load(tile + TILE_ROW_OFFSET)
    prefix_slot = tl.load(tile + TILE_PREFIX_SLOT)
    prefix_pieces = tl.load(tile + TILE_PREFIX_PIECES)
    num_stacked = unit_members * unit_len
    dims = tl.arange(0, DIMS)
    for first_row in range(0, num_stacked * HEADS_PER_KV, MERGE_M):
        rows = first_row + tl.arange(0, MERGE_M)
        stacked = rows // HEADS_PER_KV
        head = kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
        is_row = stacked < num_stacked
        token_in_member = row_offset + stacked % unit_len
        record = members + (first + stacked // unit_len) * MEMBER_FIELDS
        member_len = tl.load(record + MEMBER_LEN, mask=is_row, other=0)
        is_row &= token_in_member < member_len
        token = tl.load(record + MEMBER_TOKEN, mask=is_row, other=0) + token_in_member
        own_slot = tl.load(record + MEMBER_SLOT, mask=is_row, other=0) + token_in_member
        own_pieces = tl.load(record + MEMBER_PIECES, mask=is_row, other=0)

        output = tl.zeros([MERGE_M, DIMS], tl.float32)
        row_max = tl.full([MERGE_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([MERGE_M], tl.float32)
        for piece in range(0, prefix_pieces):
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, prefix_slot + piece * num_stacked + stacked, head,
                is_row, partial_out, partial_lse, KV_HEADS * HEADS_PER_KV, HEAD_DIM, DIMS,
            )  # fmt: skip
        for piece in range(0, tl.max(own_pieces)):
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, own_slot + piece * member_len, head,
                is_row & (piece < own_pieces),
                partial_out, partial_lse, KV_HEADS * HEADS_PER_KV, HEAD_DIM, DIMS,
            )  # fmt: skip
        output /= tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        out_rows = out + token.to(tl.int64) * stride_out_token + head * stride_out_head
        element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
        tl.store(out_rows[:, None] + dims[None, :], output.to(out.dtype.element_ty), mask=element)


@triton.jit(do_not_specialize=["stride_table"])
def prefix_attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    header,
    tiles,
    members,
    counters,
    partial_out,
    partial_lse,
    scale,
    soft_cap,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_kv_block,
    stride_kv_token,
    stride_kv_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    NARROW_M: tl.constexpr,
    NARROW_N: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_M: tl.constexpr,
    WIDE_N: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_HERE: tl.constexpr,
):
    """A persistent program: runs every num_programs-th (tile, KV head) of the step.

    `scale` is the factor on scores times the keys' scale, and times log2(e) unless the scores are
    capped first. MERGE_HERE: merge in this launch. Counters are zero before and after.
    """
    num_items = tl.load(header + HEADER_TILES) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        kv_head = item % KV_HEADS
        tile = tiles + item // KV_HEADS * TILE_FIELDS
        if tl.load(tile + TILE_FLAGS) & IS_WIDE:
            _attend_tile(
                tile, kv_head, q, k_cache, v_cache, out, block_table, members,
                partial_out, partial_lse, scale, soft_cap, v_scale,
                stride_q_token, stride_q_head,
                stride_kv_block, stride_kv_token, stride_kv_head,
                stride_out_token, stride_out_head, stride_table,
                True, WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE, HEADS_PER_KV, KV_HEADS,
                BLOCK_SIZE, HEAD_DIM, DIMS, WIDE_M, WIDE_N, WIDE_STAGES,
            )  # fmt: skip
        else:
            _attend_tile(
                tile, kv_head, q, k_cache, v_cache, out, block_table, members,
                partial_out, partial_lse, scale, soft_cap, v_scale,
                stride_q_token, stride_q_head,
                stride_kv_block, stride_kv_token, stride_kv_head,
                stride_out_token, stride_out_head, stride_table,
                False, WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE, HEADS_PER_KV, KV_HEADS,
                BLOCK_SIZE, HEAD_DIM, DIMS, NARROW_M, NARROW_N, NARROW_STAGES,
            )  # fmt: skip
        if MERGE_HERE and tl.load(tile + TILE_SLOT) >= 0:
            # A program writes all of its partials before it counts, and the last one reads all
            # partials after it sees the count: release and acquire, at the scope of the device.
            tl.debug_barrier()
            counter = counters + tl.load(tile + TILE_COUNTER) * KV_HEADS + kv_head
            num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
            if num_done == tl.load(tile + TILE_NUM_PARTIALS):
                tl.store(counter, 0)
                _merge_unit(
                    tile, kv_head, out, members, partial_out, partial_lse,
                    stride_out_token, stride_out_head,
                    HEADS_PER_KV, KV_HEADS, HEAD_DIM, DIMS, MERGE_M,
                )  # fmt: skip


@triton.jit
def merge_kernel(
    out,
    header,
    tiles,
    members,
    partial_out,
    partial_lse,
    stride_out_token,
    stride_out_head,
    HEADS_PER_KV: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    """Merge every unit that has partials, after a launch without MERGE_HERE."""
    num_items = tl.load(header + HEADER_TILES) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        tile = tiles + item // KV_HEADS * TILE_FIELDS
        if (tl.load(tile + TILE_FLAGS) & IS_FIRST) != 0 and tl.load(tile + TILE_SLOT) >= 0:
            _merge_unit(
                tile, item % KV_HEADS, out, members, partial_out, partial_lse,
                stride_out_token, stride_out_head,
                HEADS_PER_KV, KV_HEADS, HEAD_DIM, DIMS, MERGE_M,
            )  # fmt: skip
