"""The Triton kernel that cuts a step into tiles, launched after those of `grouping.py`.

`schedule.py` describes the arrays, `tiles.py` their records. All lengths are in tokens.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.grouping import query_lens_of
from batchllm_kernels.prefix_attention.device.tile_constants import (
    HEADER_COUNTERS,
    HEADER_PIECE,
    HEADER_PREFIX_TILES,
    HEADER_SLOTS,
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

_EMIT = tl.constexpr(32)
"""Tiles that a program writes at a time."""


class _Requests(NamedTuple):
    """Vectors over all requests."""

    idx: tl.tensor
    exists: tl.tensor
    query_len: tl.tensor
    prefix: tl.tensor
    rank: tl.tensor
    degree: tl.tensor
    leader: tl.tensor
    own_len: tl.tensor
    is_shared: tl.tensor
    is_wide: tl.tensor
    unit_len: tl.tensor
    tile_tokens: tl.tensor
    row_tiles: tl.tensor
    per_unit: tl.tensor
    """Members of a unit, of which a group's last may have fewer."""
    is_head: tl.tensor
    """Whether it is the first member of a unit with a prefix."""
    head_prefix: tl.tensor


class _Work(NamedTuple):
    """What each request adds to the step, if work is cut in pieces of equal length."""

    piece: tl.tensor
    own_pieces: tl.tensor
    prefix_pieces: tl.tensor
    unit_members: tl.tensor
    prefix_slots: tl.tensor
    own_slots: tl.tensor
    own_tiles: tl.tensor
    wide_tiles: tl.tensor
    narrow_tiles: tl.tensor
    own_counters: tl.tensor


class _Request(NamedTuple):
    """The program's request."""

    idx: tl.tensor
    query_len: tl.tensor
    rank: tl.tensor
    own_pieces: tl.tensor
    prefix: tl.tensor
    own_len: tl.tensor
    is_shared: tl.tensor
    first_position: tl.tensor
    """The place of its group's first member among all members."""
    own_slot: tl.tensor


class _Unit(NamedTuple):
    """The unit that reads the request's prefix; without a prefix, the request alone."""

    rank: tl.tensor
    """Its first member's."""
    first: tl.tensor
    prefix_pieces: tl.tensor
    num_partials: tl.tensor
    prefix_slot: tl.tensor
    members: tl.tensor
    len: tl.tensor


@triton.jit
def _of(values, requests, request):
    """The entry of one request in a vector over all."""
    return tl.sum(tl.where(requests == request, values, 0))


@triton.jit
def _before(values, requests, request):
    """Sum over the requests before one."""
    return tl.sum(tl.where(requests < request, values, 0))


@triton.jit
def _read_requests(
    query_start_loc, seq_lens, leaders, prefix_lens, ranks, degrees, num_requests,
    NARROW_TOKENS: tl.constexpr, WIDE_TOKENS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """All requests, with their units."""
    idx = tl.arange(0, REQUESTS)
    exists = idx < num_requests
    query_len = query_lens_of(query_start_loc, idx, num_requests)
    prefix = tl.load(prefix_lens + idx, mask=exists, other=0)
    rank = tl.load(ranks + idx, mask=exists, other=0)
    degree = tl.load(degrees + idx, mask=exists, other=1)
    leader = tl.load(leaders + idx, mask=exists, other=-1)
    own_len = tl.load(seq_lens + idx, mask=exists, other=0) - prefix

    is_shared = prefix > 0
    is_wide = query_len > NARROW_TOKENS
    unit_len = tl.where(is_shared, query_len, 1)
    tile_tokens = tl.where(is_wide, WIDE_TOKENS, NARROW_TOKENS)
    row_tiles = (query_len + tile_tokens - 1) // tile_tokens
    per_unit = tl.where(is_shared, WIDE_TOKENS // tl.maximum(unit_len, 1), 1)
    is_head = is_shared & (rank % per_unit == 0)
    head_prefix = tl.where(is_head, prefix, 0)
    return _Requests(
        idx, exists, query_len, prefix, rank, degree, leader, own_len, is_shared, is_wide,
        unit_len, tile_tokens, row_tiles, per_unit, is_head, head_prefix,
    )  # fmt: skip


@triton.jit
def _cut(each, min_piece_tokens, target_pieces, max_pieces, PIECE_ALIGN: tl.constexpr):
    """Cut the work in pieces.

    Pieces of about equal length fill the device: few requests are split, many aren't. One program
    merges all pieces of a unit, so there are at most as many as programs.
    """
    work = tl.sum(each.row_tiles.to(tl.int64) * each.own_len) + tl.sum(each.head_prefix)
    longest = tl.max(tl.where(each.query_len > 0, tl.maximum(each.own_len, each.prefix), 0))
    piece = tl.maximum((work + target_pieces - 1) // target_pieces, min_piece_tokens)
    piece = tl.maximum(piece, (longest + max_pieces - 1) // max_pieces)
    piece = ((piece + PIECE_ALIGN - 1) // PIECE_ALIGN * PIECE_ALIGN).to(tl.int32)
    own_pieces = tl.where(each.query_len > 0, (each.own_len + piece - 1) // piece, 0)
    prefix_pieces = (each.head_prefix + piece - 1) // piece
    is_partial = each.is_shared | (own_pieces > 1)

    unit_rank = each.rank // each.per_unit * each.per_unit
    unit_members = tl.minimum(each.per_unit, each.degree - unit_rank)
    prefix_slots = tl.where(each.is_head, unit_members * each.unit_len * prefix_pieces, 0)
    own_slots = tl.where(is_partial, each.query_len * own_pieces, 0)
    own_tiles = each.row_tiles * own_pieces
    wide_tiles = tl.where(each.is_wide, own_tiles, 0)
    narrow_tiles = tl.where(each.is_wide, 0, own_tiles)
    own_counters = tl.where(is_partial & ~each.is_shared, each.row_tiles, 0)
    return _Work(
        piece, own_pieces, prefix_pieces, unit_members, prefix_slots, own_slots,
        own_tiles, wide_tiles, narrow_tiles, own_counters,
    )  # fmt: skip


@triton.jit
def _place(request, each, work, leaders):
    """One request's place in the step: (request, unit)."""
    query_len = _of(each.query_len, each.idx, request)
    leader = tl.load(leaders + request)
    rank = _of(each.rank, each.idx, request)
    per_unit = _of(each.per_unit, each.idx, request)
    own_pieces = _of(work.own_pieces, each.idx, request)
    prefix = _of(each.prefix, each.idx, request)
    own_len = _of(each.own_len, each.idx, request)
    is_shared = prefix > 0
    first_position = tl.sum((each.exists & (each.leader < leader)).to(tl.int32))
    unit_rank = rank // per_unit * per_unit
    unit_first = first_position + unit_rank
    in_unit = each.exists & (each.leader == leader)
    in_unit &= each.rank // per_unit * per_unit == unit_rank
    is_unit_head = in_unit & (each.rank == unit_rank)
    prefix_pieces = tl.sum(tl.where(is_unit_head, work.prefix_pieces, 0))
    num_partials = prefix_pieces + tl.sum(tl.where(in_unit, work.own_pieces, 0))
    head = tl.sum(tl.where(is_unit_head, each.idx, 0))
    prefix_slot = _before(work.prefix_slots, each.idx, head)
    own_slot = tl.sum(work.prefix_slots) + _before(work.own_slots, each.idx, request)
    unit_members = _of(work.unit_members, each.idx, request)
    unit_len = _of(each.unit_len, each.idx, request)
    mine = _Request(
        request, query_len, rank, own_pieces, prefix, own_len, is_shared, first_position, own_slot
    )
    unit = _Unit(
        unit_rank, unit_first, prefix_pieces, num_partials, prefix_slot, unit_members, unit_len
    )
    return mine, unit


@triton.jit
def _put(tiles, at, field: tl.constexpr, value, mask):
    tl.store(tiles + at * TILE_FIELDS + field, value + tl.zeros_like(at), mask=mask)


@triton.jit
def _put_prefix_tiles(tiles, mine, unit, each, work, NARROW_TOKENS: tl.constexpr):
    """Write the tiles of the unit's prefix, which the request leads."""
    first_tile = _before(work.prefix_pieces, each.idx, mine.idx)
    for start in range(0, unit.prefix_pieces, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        mask = idx < unit.prefix_pieces
        at = first_tile + idx
        rows = unit.members * unit.len
        flags = (idx == 0).to(tl.int32) * IS_FIRST + (rows > NARROW_TOKENS).to(tl.int32) * IS_WIDE
        _put(tiles, at, TILE_FLAGS, flags, mask)
        _put(tiles, at, TILE_BLOCK_ROW, mine.idx, mask)
        kv_start = idx * work.piece
        _put(tiles, at, TILE_KV_START, kv_start, mask)
        _put(tiles, at, TILE_KV_END, tl.minimum(kv_start + work.piece, mine.prefix), mask)
        _put(tiles, at, TILE_ROWS_FIRST, unit.first, mask)
        _put(tiles, at, TILE_ROWS_MEMBERS, unit.members, mask)
        _put(tiles, at, TILE_ROWS_LEN, unit.len, mask)
        _put(tiles, at, TILE_ROW_OFFSET, 0, mask)
        _put(tiles, at, TILE_SLOT, unit.prefix_slot + idx * rows, mask)
        _put(tiles, at, TILE_COUNTER, unit.first, mask)
        _put(tiles, at, TILE_NUM_PARTIALS, unit.num_partials, mask)
        _put(tiles, at, TILE_UNIT_FIRST, unit.first, mask)
        _put(tiles, at, TILE_UNIT_MEMBERS, unit.members, mask)
        _put(tiles, at, TILE_UNIT_LEN, unit.len, mask)
        _put(tiles, at, TILE_PREFIX_SLOT, unit.prefix_slot, mask)
        _put(tiles, at, TILE_PREFIX_PIECES, unit.prefix_pieces, mask)


@triton.jit
def _put_own_tiles(
    tiles, mine, unit, each, work, num_prefix_tiles, num_wide_tiles, first_own_counter,
    NARROW_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the tiles of the request's own part."""
    wide = mine.query_len > NARROW_TOKENS
    first_wide = num_prefix_tiles + _before(work.wide_tiles, each.idx, mine.idx)
    first_narrow = num_prefix_tiles + num_wide_tiles
    first_narrow += _before(work.narrow_tiles, each.idx, mine.idx)
    first_tile = tl.where(wide, first_wide, first_narrow)
    first_counter = first_own_counter + _before(work.own_counters, each.idx, mine.idx)
    num_tiles = _of(work.own_tiles, each.idx, mine.idx)
    tile_tokens = _of(each.tile_tokens, each.idx, mine.idx)
    end = mine.prefix + mine.own_len
    partial = mine.is_shared | (mine.own_pieces > 1)
    for start in range(0, num_tiles, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        mask = idx < num_tiles
        at = first_tile + idx
        row_tile = idx // mine.own_pieces
        piece_idx = idx % mine.own_pieces
        offset = row_tile * tile_tokens
        num_tokens = tl.minimum(tile_tokens, mine.query_len - offset)
        # The tile's last query sees keys up to its own; later pieces are empty.
        visible_end = end - mine.query_len + offset + num_tokens
        kv_start = mine.prefix + piece_idx * work.piece
        slot = tl.where(partial, mine.own_slot + piece_idx * mine.query_len + offset, -1)
        is_first = (piece_idx == 0) & ~mine.is_shared
        flags = is_first.to(tl.int32) * IS_FIRST + wide.to(tl.int32) * IS_WIDE
        _put(tiles, at, TILE_FLAGS, flags, mask)
        _put(tiles, at, TILE_BLOCK_ROW, mine.idx, mask)
        _put(tiles, at, TILE_KV_START, kv_start, mask)
        _put(tiles, at, TILE_KV_END, tl.minimum(kv_start + work.piece, visible_end), mask)
        _put(tiles, at, TILE_ROWS_FIRST, mine.first_position + mine.rank, mask)
        _put(tiles, at, TILE_ROWS_MEMBERS, 1, mask)
        _put(tiles, at, TILE_ROWS_LEN, num_tokens, mask)
        _put(tiles, at, TILE_ROW_OFFSET, offset, mask)
        _put(tiles, at, TILE_SLOT, slot, mask)
        counter = tl.where(mine.is_shared, unit.first, first_counter + row_tile)
        _put(tiles, at, TILE_COUNTER, counter, mask)
        num_partials = tl.where(mine.is_shared, unit.num_partials, mine.own_pieces)
        _put(tiles, at, TILE_NUM_PARTIALS, num_partials, mask)
        _put(tiles, at, TILE_UNIT_FIRST, unit.first, mask)
        _put(tiles, at, TILE_UNIT_MEMBERS, unit.members, mask)
        _put(tiles, at, TILE_UNIT_LEN, tl.where(mine.is_shared, unit.len, num_tokens), mask)
        _put(tiles, at, TILE_PREFIX_SLOT, unit.prefix_slot, mask)
        _put(tiles, at, TILE_PREFIX_PIECES, unit.prefix_pieces, mask)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "min_piece_tokens",
        "target_pieces",
        "max_pieces",
        "first_own_counter",
    ]
)
def lay_out(
    query_start_loc, seq_lens, leaders, prefix_lens, ranks, degrees, header, tiles, members,
    num_requests, min_piece_tokens, target_pieces, max_pieces, first_own_counter,
    PIECE_ALIGN: tl.constexpr, NARROW_TOKENS: tl.constexpr, WIDE_TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """Write each request's tiles: those of its own part, and of its unit's prefix if it leads."""
    request = tl.program_id(0)
    each = _read_requests(
        query_start_loc, seq_lens, leaders, prefix_lens, ranks, degrees, num_requests,
        NARROW_TOKENS, WIDE_TOKENS, REQUESTS,
    )  # fmt: skip
    work = _cut(each, min_piece_tokens, target_pieces, max_pieces, PIECE_ALIGN)
    num_prefix_tiles = tl.sum(work.prefix_pieces)
    num_wide_tiles = tl.sum(work.wide_tiles)
    mine, unit = _place(request, each, work, leaders)

    query_start = tl.load(query_start_loc + request)
    record = members + (mine.first_position + mine.rank) * MEMBER_FIELDS
    tl.store(record + MEMBER_TOKEN, query_start)
    tl.store(record + MEMBER_POSITION, mine.prefix + mine.own_len - mine.query_len)
    tl.store(record + MEMBER_LEN, mine.query_len)
    tl.store(record + MEMBER_SLOT, mine.own_slot)
    tl.store(record + MEMBER_PIECES, mine.own_pieces)
    if request == 0:
        num_tiles = num_prefix_tiles + num_wide_tiles + tl.sum(work.narrow_tiles)
        tl.store(header + HEADER_TILES, num_tiles)
        tl.store(header + HEADER_PREFIX_TILES, num_prefix_tiles)
        tl.store(header + HEADER_SLOTS, tl.sum(work.prefix_slots) + tl.sum(work.own_slots))
        tl.store(header + HEADER_COUNTERS, tl.sum(work.own_counters))
        tl.store(header + HEADER_PIECE, work.piece)
    if mine.is_shared & (mine.rank == unit.rank):
        _put_prefix_tiles(tiles, mine, unit, each, work, NARROW_TOKENS)
    _put_own_tiles(
        tiles, mine, unit, each, work, num_prefix_tiles, num_wide_tiles, first_own_counter,
        NARROW_TOKENS,
    )  # fmt: skip
