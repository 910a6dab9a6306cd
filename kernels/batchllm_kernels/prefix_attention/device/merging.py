"""Merges partials by online softmax (paper, Eq. 1), and a launch that does nothing else.

Logarithms are to the base 2.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.arguments import Results
from batchllm_kernels.prefix_attention.device.tile_constants import (
    HEADER_TILES,
    IS_FIRST,
    MEMBER_FIELDS,
    MEMBER_LEN,
    MEMBER_PIECES,
    MEMBER_SLOT,
    MEMBER_TOKEN,
    TILE_FIELDS,
    TILE_FLAGS,
    TILE_PREFIX_PIECES,
    TILE_PREFIX_SLOT,
    TILE_ROW_OFFSET,
    TILE_SLOT,
    TILE_UNIT_FIRST,
    TILE_UNIT_LEN,
    TILE_UNIT_MEMBERS,
)


@triton.jit
def _merge_partial(
    output, row_max, row_sum, slot, head, mask, dims, results,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge each row's partial in `slot` into the result so far."""
    at = slot.to(tl.int64) * HEADS + head
    # Not from the L1 cache: another multiprocessor wrote it.
    lse = tl.load(results.partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    element = (lse > float("-inf"))[:, None] & (dims[None, :] < HEAD_DIM)
    partial = tl.load(
        results.partial_out + at[:, None] * HEAD_DIM + dims[None, :],
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
def merge_unit(
    tile, kv_head, members, results,
    HEADS_PER_KV: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, MERGE_M: tl.constexpr,
):  # fmt: skip
    """Merge all partials of a tile's unit for one KV head, and write the output."""
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
            slot = prefix_slot + piece * num_stacked + stacked
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, slot, head, is_row, dims, results,
                KV_HEADS * HEADS_PER_KV, HEAD_DIM,
            )  # fmt: skip
        for piece in range(0, tl.max(own_pieces)):
            slot = own_slot + piece * member_len
            has_piece = is_row & (piece < own_pieces)
            output, row_max, row_sum = _merge_partial(
                output, row_max, row_sum, slot, head, has_piece, dims, results,
                KV_HEADS * HEADS_PER_KV, HEAD_DIM,
            )  # fmt: skip
        output /= tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        write_output(output, token, head, is_row, dims, results, HEAD_DIM)


@triton.jit
def write_output(output, token, head, is_row, dims, results, HEAD_DIM: tl.constexpr):
    """Write each row's output to its query token and head."""
    out = results.out
    out_rows = out + token.to(tl.int64) * results.stride_token + head * results.stride_head
    element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(out_rows[:, None] + dims[None, :], output.to(out.dtype.element_ty), mask=element)


@triton.jit
def merge_kernel(
    out, header, tiles, members, partial_out, partial_lse, stride_out_token, stride_out_head,
    HEADS_PER_KV: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, MERGE_M: tl.constexpr,
):  # fmt: skip
    """Merge every unit that has partials, after a launch without MERGE_HERE."""
    results = Results(out, partial_out, partial_lse, stride_out_token, stride_out_head)
    num_items = tl.load(header + HEADER_TILES) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        tile = tiles + item // KV_HEADS * TILE_FIELDS
        if (tl.load(tile + TILE_FLAGS) & IS_FIRST) != 0 and tl.load(tile + TILE_SLOT) >= 0:
            merge_unit(
                tile, item % KV_HEADS, members, results,
                HEADS_PER_KV, KV_HEADS, HEAD_DIM, DIMS, MERGE_M,
            )  # fmt: skip
