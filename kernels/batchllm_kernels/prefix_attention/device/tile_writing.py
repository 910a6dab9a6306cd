"""Writes the tiles of one request, whose place in the step `layout.py` has found."""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.tile_constants import (
    IS_FIRST,
    IS_WIDE,
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

_EMIT = tl.constexpr(32)
"""Tiles that a program writes at a time."""


@triton.jit
def _put(tiles, at, field: tl.constexpr, value, mask):
    tl.store(tiles + at * TILE_FIELDS + field, value + tl.zeros_like(at), mask=mask)


@triton.jit
def put_prefix_tiles(tiles, mine, place, piece, NARROW_TOKENS: tl.constexpr):
    """Write the tiles of the unit's prefix, which the request leads."""
    rows = mine.unit_members * mine.unit_len
    for start in range(0, place.prefix_pieces, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        mask = idx < place.prefix_pieces
        at = place.first_prefix_tile + idx
        flags = (idx == 0).to(tl.int32) * IS_FIRST + (rows > NARROW_TOKENS).to(tl.int32) * IS_WIDE
        kv_start = idx * piece
        _put(tiles, at, TILE_FLAGS, flags, mask)
        _put(tiles, at, TILE_BLOCK_ROW, mine.idx, mask)
        _put(tiles, at, TILE_KV_START, kv_start, mask)
        _put(tiles, at, TILE_KV_END, tl.minimum(kv_start + piece, mine.prefix), mask)
        _put(tiles, at, TILE_ROWS_FIRST, place.unit_first, mask)
        _put(tiles, at, TILE_ROWS_MEMBERS, mine.unit_members, mask)
        _put(tiles, at, TILE_ROWS_LEN, mine.unit_len, mask)
        _put(tiles, at, TILE_ROW_OFFSET, 0, mask)
        _put(tiles, at, TILE_SLOT, place.prefix_slot + idx * rows, mask)
        _put(tiles, at, TILE_COUNTER, place.unit_first, mask)
        _put(tiles, at, TILE_NUM_PARTIALS, place.num_partials, mask)
        _put(tiles, at, TILE_UNIT_LEN, mine.unit_len, mask)
        _put_unit(tiles, at, mine, place, mask)


@triton.jit
def put_own_tiles(tiles, mine, cut, place, piece):
    """Write the tiles of the request's own part."""
    num_tiles = cut.wide_tiles + cut.narrow_tiles
    end = mine.prefix + mine.own_len
    partial = mine.is_shared | (cut.own_pieces > 1)
    for start in range(0, num_tiles, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        mask = idx < num_tiles
        at = place.first_own_tile + idx
        row_tile = idx // cut.own_pieces
        piece_idx = idx % cut.own_pieces
        offset = row_tile * mine.tile_tokens
        num_tokens = tl.minimum(mine.tile_tokens, mine.query_len - offset)
        # The tile's last query sees keys up to its own; later pieces are empty.
        visible_end = end - mine.query_len + offset + num_tokens
        kv_start = mine.prefix + piece_idx * piece
        slot = tl.where(partial, place.own_slot + piece_idx * mine.query_len + offset, -1)
        is_first = (piece_idx == 0) & (mine.is_shared == 0)
        flags = is_first.to(tl.int32) * IS_FIRST + mine.is_wide.to(tl.int32) * IS_WIDE
        counter = tl.where(mine.is_shared, place.unit_first, place.own_counter + row_tile)
        num_partials = tl.where(mine.is_shared, place.num_partials, cut.own_pieces)
        _put(tiles, at, TILE_FLAGS, flags, mask)
        _put(tiles, at, TILE_BLOCK_ROW, mine.idx, mask)
        _put(tiles, at, TILE_KV_START, kv_start, mask)
        _put(tiles, at, TILE_KV_END, tl.minimum(kv_start + piece, visible_end), mask)
        _put(tiles, at, TILE_ROWS_FIRST, place.first_position + mine.rank, mask)
        _put(tiles, at, TILE_ROWS_MEMBERS, 1, mask)
        _put(tiles, at, TILE_ROWS_LEN, num_tokens, mask)
        _put(tiles, at, TILE_ROW_OFFSET, offset, mask)
        _put(tiles, at, TILE_SLOT, slot, mask)
        _put(tiles, at, TILE_COUNTER, counter, mask)
        _put(tiles, at, TILE_NUM_PARTIALS, num_partials, mask)
        _put(tiles, at, TILE_UNIT_LEN, tl.where(mine.is_shared, mine.unit_len, num_tokens), mask)
        _put_unit(tiles, at, mine, place, mask)


@triton.jit
def _put_unit(tiles, at, mine, place, mask):
    """Write what all tiles of a unit have in common."""
    _put(tiles, at, TILE_UNIT_FIRST, place.unit_first, mask)
    _put(tiles, at, TILE_UNIT_MEMBERS, mine.unit_members, mask)
    _put(tiles, at, TILE_PREFIX_SLOT, place.prefix_slot, mask)
    _put(tiles, at, TILE_PREFIX_PIECES, place.prefix_pieces, mask)
