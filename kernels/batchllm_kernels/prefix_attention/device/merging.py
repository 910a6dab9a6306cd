"""Merges partials by online softmax (paper, Eq. 1), and a launch that does nothing else.

Logarithms are to the base 2.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.arguments import Results
from batchllm_kernels.prefix_attention.device.tiles import IS_FIRST, read_members, read_tile


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
