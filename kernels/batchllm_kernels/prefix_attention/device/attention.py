"""The fused kernel: prefix tiles and own tiles of a step in one launch, with their merge.

Paper, Sec. 4.4: the partial attention over shared prefixes (matrix-matrix) and over each request's
own part run in different programs of one kernel, with their own tilings. The program that finishes
a unit's last tile merges the unit's partials by online softmax (Eq. 1); if a chip doesn't order
memory well enough for that, `merge_kernel` follows. `tiles.py` describes the work, which
`layout.py` writes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.arguments import (
    Cache,
    Factors,
    Queries,
    Results,
)
from batchllm_kernels.prefix_attention.device.merging import merge_unit, write_output
from batchllm_kernels.prefix_attention.device.online_softmax import Context, online_softmax_update
from batchllm_kernels.prefix_attention.device.tile_constants import (
    HEADER_TILES,
    IS_WIDE,
    MEMBER_FIELDS,
    MEMBER_LEN,
    MEMBER_POSITION,
    MEMBER_TOKEN,
    TILE_BLOCK_ROW,
    TILE_COUNTER,
    TILE_FIELDS,
    TILE_FLAGS,
    TILE_KV_END,
    TILE_KV_START,
    TILE_NUM_PARTIALS,
    TILE_ROW_OFFSET,
    TILE_ROWS_FIRST,
    TILE_ROWS_LEN,
    TILE_ROWS_MEMBERS,
    TILE_SLOT,
)

_FAR = tl.constexpr(2**30)
"""Position of rows without a query: they see every key, and their results aren't used."""

_FLOAT16_MAX = tl.constexpr(65504.0)


class _Rows(NamedTuple):
    """A tile's rows (query token x query head of one KV head): vectors over them."""

    stacked: tl.tensor
    """Query tokens before it in the tile."""
    head: tl.tensor
    is_row: tl.tensor
    """Whether it has a query."""
    token: tl.tensor
    position: tl.tensor
    """Of the query token in its context."""


@triton.jit
def _rows(
    tile, kv_head, members, rows_len, row_offset, HEADS_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The rows of a tile that stacks `rows_len` tokens of each member, from `row_offset` on."""
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
    return _Rows(stacked, head, is_row, token, position)


@triton.jit
def _load_queries(queries, rows, dims, HEAD_DIM: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """The rows' queries as operands of a matrix product: [BLOCK_M, DIMS]."""
    element = rows.is_row[:, None] & (dims[None, :] < HEAD_DIM)
    token_at = rows.token.to(tl.int64) * queries.stride_token
    q_rows = queries.q + token_at + rows.head * queries.stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=element, other=0.0)
    if tl.float16 == DOT_DTYPE and queries.q.dtype.element_ty != tl.float16:
        q = tl.clamp(q.to(tl.float32), -_FLOAT16_MAX, _FLOAT16_MAX)
    return q.to(DOT_DTYPE)


@triton.jit
def _write_tile(
    output, row_max, row_sum, slot, rows, dims, results,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write the output, or partials to the slots from `slot` on if that isn't -1."""
    if slot < 0:
        write_output(output, rows.token, rows.head, rows.is_row, dims, results, HEAD_DIM)
    else:
        # A row that saw no key has row_max = -inf.
        lse = row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))
        first_slot = slot.to(tl.int64) * HEADS
        at = rows.stacked * HEADS + rows.head
        tl.store(results.partial_lse + first_slot + at, lse, mask=rows.is_row)
        element = rows.is_row[:, None] & (dims[None, :] < HEAD_DIM)
        partial_rows = results.partial_out + first_slot * HEAD_DIM + at[:, None] * HEAD_DIM
        tl.store(partial_rows + dims[None, :], output, mask=element)


@triton.jit
def _attend_tile(
    tile, kv_head, members, queries, cache, factors, results, SPLIT_MASKED: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr, DOT_DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head: writes the output if it is the unit's only one, else its slots.

    SPLIT_MASKED: run steps that all rows see entirely in a loop without masks.
    """
    start = tl.load(tile + TILE_KV_START)
    end = tl.load(tile + TILE_KV_END)
    rows_len = tl.load(tile + TILE_ROWS_LEN)
    slot = tl.load(tile + TILE_SLOT)
    row_offset = tl.load(tile + TILE_ROW_OFFSET)
    row_of_table = tl.load(tile + TILE_BLOCK_ROW).to(tl.int64)
    block_row = cache.block_table + row_of_table * cache.stride_table
    rows = _rows(tile, kv_head, members, rows_len, row_offset, HEADS_PER_KV, BLOCK_M)

    dims = tl.arange(0, DIMS)
    q = _load_queries(queries, rows, dims, HEAD_DIM, DOT_DTYPE)
    k_head = cache.k + kv_head.to(tl.int64) * cache.stride_head
    v_head = cache.v + kv_head.to(tl.int64) * cache.stride_head
    context = Context(block_row, k_head, v_head, cache.stride_block, cache.stride_token)

    output = tl.zeros([BLOCK_M, DIMS], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW > 0:
        start = tl.maximum(start, tl.min(rows.position) - WINDOW + 1)
    if SPLIT_MASKED and WINDOW == 0:
        seen_by_all = tl.minimum(end, tl.min(rows.position) + 1)
        whole = tl.maximum(seen_by_all - start, 0) // BLOCK_N * BLOCK_N
        output, row_max, row_sum = online_softmax_update(
            q, output, row_max, row_sum, rows.position, start, start + whole,
            context, factors, False, WINDOW, HAS_SOFT_CAP,
            KV_FORMAT, BLOCK_SIZE, HEAD_DIM, BLOCK_N, STAGES,
        )  # fmt: skip
        start += whole
    output, row_max, row_sum = online_softmax_update(
        q, output, row_max, row_sum, rows.position, start, end,
        context, factors, True, WINDOW, HAS_SOFT_CAP,
        KV_FORMAT, BLOCK_SIZE, HEAD_DIM, BLOCK_N, STAGES,
    )  # fmt: skip

    output *= (factors.v_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    _write_tile(
        output, row_max, row_sum, slot, rows, dims, results, KV_HEADS * HEADS_PER_KV, HEAD_DIM
    )


@triton.jit
def _merge_after_last(
    tile, kv_head, counters, members, results,
    HEADS_PER_KV: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, MERGE_M: tl.constexpr,
):  # fmt: skip
    """Count a tile that has written its partials; if it is the last of its unit, merge the unit.

    A program writes all of its partials before it counts, and the last one reads all partials after
    it sees the count: release and acquire, at the scope of the device.
    """
    tl.debug_barrier()
    counter = counters + tl.load(tile + TILE_COUNTER) * KV_HEADS + kv_head
    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    if num_done == tl.load(tile + TILE_NUM_PARTIALS):
        tl.store(counter, 0)
        merge_unit(
            tile, kv_head, members, results,
            HEADS_PER_KV, KV_HEADS, HEAD_DIM, DIMS, MERGE_M,
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table"])
def prefix_attention_kernel(
    q, k_cache, v_cache, out, block_table, header, tiles, members, counters,
    partial_out, partial_lse, scale, soft_cap, v_scale,
    stride_q_token, stride_q_head, stride_kv_block, stride_kv_token, stride_kv_head,
    stride_out_token, stride_out_head, stride_table,
    WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr, DOT_DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    NARROW_M: tl.constexpr, NARROW_N: tl.constexpr, NARROW_STAGES: tl.constexpr,
    WIDE_M: tl.constexpr, WIDE_N: tl.constexpr, WIDE_STAGES: tl.constexpr,
    MERGE_M: tl.constexpr, MERGE_HERE: tl.constexpr,
):  # fmt: skip
    """A persistent program: runs every num_programs-th (tile, KV head) of the step.

    MERGE_HERE: merge in this launch. Counters are zero before and after.
    """
    queries = Queries(q, stride_q_token, stride_q_head)
    cache = Cache(
        k_cache, v_cache, block_table,
        stride_kv_block, stride_kv_token, stride_kv_head, stride_table,
    )  # fmt: skip
    factors = Factors(scale, soft_cap, v_scale)
    results = Results(out, partial_out, partial_lse, stride_out_token, stride_out_head)
    num_items = tl.load(header + HEADER_TILES) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        kv_head = item % KV_HEADS
        tile = tiles + item // KV_HEADS * TILE_FIELDS
        if tl.load(tile + TILE_FLAGS) & IS_WIDE:
            _attend_tile(
                tile, kv_head, members, queries, cache, factors, results, True,
                WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE, BLOCK_SIZE, HEADS_PER_KV, KV_HEADS,
                HEAD_DIM, DIMS, WIDE_M, WIDE_N, WIDE_STAGES,
            )  # fmt: skip
        else:
            _attend_tile(
                tile, kv_head, members, queries, cache, factors, results, False,
                WINDOW, HAS_SOFT_CAP, KV_FORMAT, DOT_DTYPE, BLOCK_SIZE, HEADS_PER_KV, KV_HEADS,
                HEAD_DIM, DIMS, NARROW_M, NARROW_N, NARROW_STAGES,
            )  # fmt: skip
        if MERGE_HERE and tl.load(tile + TILE_SLOT) >= 0:
            _merge_after_last(
                tile, kv_head, counters, members, results,
                HEADS_PER_KV, KV_HEADS, HEAD_DIM, DIMS, MERGE_M,
            )  # fmt: skip
