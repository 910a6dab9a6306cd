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

from batchllm_kernels.prefix_attention.device.arguments import Cache, Factors, Queries, Results
from batchllm_kernels.prefix_attention.device.online_softmax import (
    merge_unit,
    online_softmax_update,
    write_output,
)
from batchllm_kernels.prefix_attention.device.tiles import IS_WIDE, read_members, read_tile

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
def _rows(tile, kv_head, members, BLOCK_M: tl.constexpr, CONST: tl.constexpr):
    """The rows of a tile that stacks `rows_len` tokens of each member, from `row_offset` on."""
    rows = tl.arange(0, BLOCK_M)
    stacked = rows // CONST.heads_per_kv
    head = kv_head * CONST.heads_per_kv + rows % CONST.heads_per_kv
    idx = stacked // tile.rows_len
    member = read_members(members, tile.rows_first + idx, idx < tile.rows_members)
    token_in_member = tile.row_offset + stacked % tile.rows_len
    is_row = token_in_member < member.query_len
    position = tl.where(is_row, member.position + token_in_member, _FAR)
    return _Rows(stacked, head, is_row, member.token + token_in_member, position)


@triton.jit
def _load_queries(queries, rows, dims, CONST: tl.constexpr):
    """The rows' queries as operands of a matrix product: [BLOCK_M, dims]."""
    element = rows.is_row[:, None] & (dims[None, :] < CONST.head_dim)
    token_at = rows.token.to(tl.int64) * queries.stride_token
    q_rows = queries.q + token_at + rows.head * queries.stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=element, other=0.0)
    if CONST.dot_dtype == "fp16" and queries.q.dtype.element_ty != tl.float16:
        q = tl.clamp(q.to(tl.float32), -_FLOAT16_MAX, _FLOAT16_MAX)
    return q.to(tl.dtype(CONST.dot_dtype))


@triton.jit
def _write_tile(output, row_max, row_sum, slot, rows, dims, results, CONST: tl.constexpr):
    """Write the output, or partials to the slots from `slot` on if that isn't -1."""
    if slot < 0:
        write_output(output, rows.token, rows.head, rows.is_row, dims, results, CONST)
    else:
        # A row that saw no key has row_max = -inf.
        lse = row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))
        heads: tl.constexpr = CONST.kv_heads * CONST.heads_per_kv
        first_slot = slot.to(tl.int64) * heads
        at = rows.stacked * heads + rows.head
        tl.store(results.partial_lse + first_slot + at, lse, mask=rows.is_row)
        element = rows.is_row[:, None] & (dims[None, :] < CONST.head_dim)
        first_row = results.partial_out + first_slot * CONST.head_dim
        partial_rows = first_row + at[:, None] * CONST.head_dim
        tl.store(partial_rows + dims[None, :], output, mask=element)


@triton.jit
def _attend_tile(
    tile, kv_head, members, queries, cache, stride_kv_head, stride_table, factors, results,
    WIDE: tl.constexpr, CONST: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head: writes the output if it is the unit's only one, else its slots.

    A wide tile runs steps that all rows see entirely in a loop without masks.
    """
    num_dims: tl.constexpr = CONST.dims  # Triton 3.6 takes no attribute in a shape
    block_m: tl.constexpr = CONST.wide_m if WIDE else CONST.narrow_m
    block_n: tl.constexpr = CONST.wide_n if WIDE else CONST.narrow_n
    stages: tl.constexpr = CONST.wide_stages if WIDE else CONST.narrow_stages
    start = tile.kv_start
    rows = _rows(tile, kv_head, members, block_m, CONST)
    dims = tl.arange(0, num_dims)
    q = _load_queries(queries, rows, dims, CONST)
    head_at = kv_head.to(tl.int64) * stride_kv_head
    block_row = cache.block_table + tile.block_row.to(tl.int64) * stride_table
    cache = Cache(
        cache.k + head_at, cache.v + head_at, block_row, cache.stride_block, cache.stride_token
    )
    output = tl.zeros([block_m, num_dims], tl.float32)
    row_max = tl.full([block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    if CONST.window > 0:
        start = tl.maximum(start, tl.min(rows.position) - CONST.window + 1)
    if WIDE and CONST.window == 0:
        seen_by_all = tl.minimum(tile.kv_end, tl.min(rows.position) + 1)
        whole = tl.maximum(seen_by_all - start, 0) // block_n * block_n
        output, row_max, row_sum = online_softmax_update(
            q, output, row_max, row_sum, rows.position, start, start + whole, cache, factors,
            False, block_n, stages, CONST,
        )  # fmt: skip
        start += whole
    output, row_max, row_sum = online_softmax_update(
        q, output, row_max, row_sum, rows.position, start, tile.kv_end, cache, factors,
        True, block_n, stages, CONST,
    )  # fmt: skip

    output *= (factors.v_scale / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
    _write_tile(output, row_max, row_sum, tile.slot, rows, dims, results, CONST)


@triton.jit
def _merge_after_last(tile, kv_head, counters, members, results, CONST: tl.constexpr):
    """Count a tile that has written its partials; if it is the last of its unit, merge the unit.

    A program writes all of its partials before it counts, and the last one reads all partials after
    it sees the count: release and acquire, at the scope of the device.
    """
    tl.debug_barrier()
    counter = counters + tile.counter * CONST.kv_heads + kv_head
    num_done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    if num_done == tile.num_partials:
        tl.store(counter, 0)
        merge_unit(tile, kv_head, members, results, CONST)


@triton.jit(do_not_specialize=["stride_table"])
def prefix_attention_kernel(
    q, k_cache, v_cache, out, block_table, header, tiles, members, counters,
    partial_out, partial_lse, scale, soft_cap, v_scale,
    stride_q_token, stride_q_head, stride_kv_block, stride_kv_token, stride_kv_head,
    stride_out_token, stride_out_head, stride_table,
    CONST: tl.constexpr,
):  # fmt: skip
    """A persistent program: runs every num_programs-th (tile, KV head) of the step.

    Counters are zero before and after.
    """
    queries = Queries(q, stride_q_token, stride_q_head)
    cache = Cache(k_cache, v_cache, block_table, stride_kv_block, stride_kv_token)
    factors = Factors(scale, soft_cap, v_scale)
    results = Results(out, partial_out, partial_lse, stride_out_token, stride_out_head)
    num_items = tl.load(header) * CONST.kv_heads
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        kv_head = item % CONST.kv_heads
        tile = read_tile(tiles, item // CONST.kv_heads)
        if tile.flags & IS_WIDE:
            _attend_tile(
                tile, kv_head, members, queries, cache, stride_kv_head, stride_table, factors,
                results, True, CONST,
            )  # fmt: skip
        else:
            _attend_tile(
                tile, kv_head, members, queries, cache, stride_kv_head, stride_table, factors,
                results, False, CONST,
            )  # fmt: skip
        if CONST.merge_here:
            # Read again, so that no register holds it during the loop over keys.
            tile = read_tile(tiles, item // CONST.kv_heads)
            if tile.slot >= 0:
                _merge_after_last(tile, kv_head, counters, members, results, CONST)
