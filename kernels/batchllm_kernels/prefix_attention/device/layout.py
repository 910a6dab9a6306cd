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
    MEMBER_FIELDS,
    MEMBER_LEN,
    MEMBER_PIECES,
    MEMBER_POSITION,
    MEMBER_SLOT,
    MEMBER_TOKEN,
)
from batchllm_kernels.prefix_attention.device.tile_writing import (
    put_own_tiles,
    put_prefix_tiles,
)


class _Arrays(NamedTuple):
    """What is known of the requests, by request."""

    query_start_loc: tl.tensor
    seq_lens: tl.tensor
    leaders: tl.tensor
    prefix_lens: tl.tensor
    ranks: tl.tensor
    degrees: tl.tensor
    num_requests: tl.tensor


class _Requests(NamedTuple):
    """Some requests, or one: vectors over them, or scalars."""

    idx: tl.tensor
    exists: tl.tensor
    query_len: tl.tensor
    prefix: tl.tensor
    rank: tl.tensor
    leader: tl.tensor
    own_len: tl.tensor
    is_shared: tl.tensor
    is_wide: tl.tensor
    tile_tokens: tl.tensor
    row_tiles: tl.tensor
    unit_rank: tl.tensor
    """Rank of its unit's first member, which reads the unit's prefix."""
    unit_len: tl.tensor
    unit_members: tl.tensor
    """A group's last unit may have fewer than the others."""
    head_prefix: tl.tensor
    """The prefix that it reads for its unit."""


class _Cut(NamedTuple):
    """What requests add to the step, when work is cut in pieces of equal length."""

    own_pieces: tl.tensor
    prefix_pieces: tl.tensor
    """That it reads for its unit."""
    prefix_slots: tl.tensor
    own_slots: tl.tensor
    wide_tiles: tl.tensor
    narrow_tiles: tl.tensor
    """Tiles of own parts, by their tiling."""
    own_counters: tl.tensor


class _Place(NamedTuple):
    """Where the parts of the program's request are, and those of its unit."""

    first_position: tl.tensor
    """The place of its group's first member among all members."""
    unit_first: tl.tensor
    """The place of its unit's first member."""
    prefix_pieces: tl.tensor
    """Of its unit."""
    num_partials: tl.tensor
    """Of its unit."""
    prefix_slot: tl.tensor
    own_slot: tl.tensor
    first_prefix_tile: tl.tensor
    first_own_tile: tl.tensor
    own_counter: tl.tensor


class _Totals(NamedTuple):
    """Of the step, as in its header."""

    tiles: tl.tensor
    prefix_tiles: tl.tensor
    slots: tl.tensor
    counters: tl.tensor


@triton.jit
def _read(arrays, idx, NARROW_TOKENS: tl.constexpr, WIDE_TOKENS: tl.constexpr):
    """The requests at `idx`, with their units."""
    exists = idx < arrays.num_requests
    query_len = query_lens_of(arrays.query_start_loc, idx, arrays.num_requests)
    prefix = tl.load(arrays.prefix_lens + idx, mask=exists, other=0)
    rank = tl.load(arrays.ranks + idx, mask=exists, other=0)
    degree = tl.load(arrays.degrees + idx, mask=exists, other=1)
    leader = tl.load(arrays.leaders + idx, mask=exists, other=-1)
    own_len = tl.load(arrays.seq_lens + idx, mask=exists, other=0) - prefix

    is_shared = prefix > 0
    is_wide = query_len > NARROW_TOKENS
    tile_tokens = tl.where(is_wide, WIDE_TOKENS, NARROW_TOKENS)
    row_tiles = (query_len + tile_tokens - 1) // tile_tokens
    unit_len = tl.where(is_shared, query_len, 1)
    per_unit = tl.where(is_shared, WIDE_TOKENS // tl.maximum(unit_len, 1), 1)
    unit_rank = rank // per_unit * per_unit
    unit_members = tl.minimum(per_unit, degree - unit_rank)
    head_prefix = tl.where(rank == unit_rank, prefix, 0)
    return _Requests(
        idx, exists, query_len, prefix, rank, leader, own_len, is_shared, is_wide,
        tile_tokens, row_tiles, unit_rank, unit_len, unit_members, head_prefix,
    )  # fmt: skip


@triton.jit
def _cut(each, piece):
    own_pieces = tl.where(each.query_len > 0, (each.own_len + piece - 1) // piece, 0)
    prefix_pieces = (each.head_prefix + piece - 1) // piece
    is_partial = each.is_shared | (own_pieces > 1)
    own_tiles = each.row_tiles * own_pieces
    return _Cut(
        own_pieces,
        prefix_pieces,
        each.unit_members * each.unit_len * prefix_pieces,
        tl.where(is_partial, each.query_len * own_pieces, 0),
        tl.where(each.is_wide, own_tiles, 0),
        tl.where(each.is_wide, 0, own_tiles),
        tl.where(is_partial & (each.is_shared == 0), each.row_tiles, 0),
    )


@triton.jit
def _survey(
    mine, arrays, min_piece_tokens, target_pieces, max_pieces,
    PIECE_ALIGN: tl.constexpr, NARROW_TOKENS: tl.constexpr, WIDE_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(tokens of a piece, the head of the request's unit, its group's first position).

    Pieces of about equal length fill the device: few requests are split, many aren't. One program
    merges all pieces of a unit, so there are at most as many as programs.
    """
    work = tl.full([], 0, tl.int64)
    longest = 0
    head = 0
    first_position = 0
    for first in range(0, arrays.num_requests, CHUNK):
        each = _read(arrays, first + tl.arange(0, CHUNK), NARROW_TOKENS, WIDE_TOKENS)
        work += tl.sum(each.row_tiles.to(tl.int64) * each.own_len + each.head_prefix)
        context = tl.maximum(each.own_len, each.prefix)
        longest = tl.maximum(longest, tl.max(tl.where(each.query_len > 0, context, 0)))
        is_head = each.exists & (each.leader == mine.leader) & (each.rank == mine.unit_rank)
        head += tl.sum(tl.where(is_head, each.idx, 0))
        first_position += tl.sum((each.exists & (each.leader < mine.leader)).to(tl.int32))
    piece = tl.maximum((work + target_pieces - 1) // target_pieces, min_piece_tokens)
    piece = tl.maximum(piece, (longest + max_pieces - 1) // max_pieces)
    piece = ((piece + PIECE_ALIGN - 1) // PIECE_ALIGN * PIECE_ALIGN).to(tl.int32)
    return piece, head, first_position


@triton.jit
def _place(
    mine, arrays, piece, head, first_position, first_own_counter,
    NARROW_TOKENS: tl.constexpr, WIDE_TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(place of the request, totals of the step)."""
    prefix_tiles = 0
    wide_tiles = 0
    narrow_tiles = 0
    prefix_slots = 0
    own_slots = 0
    counters = 0
    unit_own_pieces = 0
    prefix_tiles_before = 0
    wide_tiles_before = 0
    narrow_tiles_before = 0
    prefix_slots_before = 0
    own_slots_before = 0
    counters_before = 0
    for first in range(0, arrays.num_requests, CHUNK):
        each = _read(arrays, first + tl.arange(0, CHUNK), NARROW_TOKENS, WIDE_TOKENS)
        cuts = _cut(each, piece)
        prefix_tiles += tl.sum(cuts.prefix_pieces)
        wide_tiles += tl.sum(cuts.wide_tiles)
        narrow_tiles += tl.sum(cuts.narrow_tiles)
        prefix_slots += tl.sum(cuts.prefix_slots)
        own_slots += tl.sum(cuts.own_slots)
        counters += tl.sum(cuts.own_counters)
        in_unit = each.exists & (each.leader == mine.leader)
        in_unit &= each.unit_rank == mine.unit_rank
        unit_own_pieces += tl.sum(tl.where(in_unit, cuts.own_pieces, 0))
        before = each.idx < mine.idx
        prefix_tiles_before += tl.sum(tl.where(before, cuts.prefix_pieces, 0))
        wide_tiles_before += tl.sum(tl.where(before, cuts.wide_tiles, 0))
        narrow_tiles_before += tl.sum(tl.where(before, cuts.narrow_tiles, 0))
        prefix_slots_before += tl.sum(tl.where(each.idx < head, cuts.prefix_slots, 0))
        own_slots_before += tl.sum(tl.where(before, cuts.own_slots, 0))
        counters_before += tl.sum(tl.where(before, cuts.own_counters, 0))
    unit_prefix_pieces = (mine.prefix + piece - 1) // piece
    narrow_tile = prefix_tiles + wide_tiles + narrow_tiles_before
    place = _Place(
        first_position,
        first_position + mine.unit_rank,
        unit_prefix_pieces,
        unit_prefix_pieces + unit_own_pieces,
        prefix_slots_before,
        prefix_slots + own_slots_before,
        prefix_tiles_before,
        tl.where(mine.is_wide, prefix_tiles + wide_tiles_before, narrow_tile),
        first_own_counter + counters_before,
    )
    tiles = prefix_tiles + wide_tiles + narrow_tiles
    return place, _Totals(tiles, prefix_tiles, prefix_slots + own_slots, counters)


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
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write each request's tiles: those of its own part, and of its unit's prefix if it leads.

    Each program reads all requests twice, CHUNK at a time, so that any number fits its registers.
    """
    request = tl.program_id(0)
    arrays = _Arrays(query_start_loc, seq_lens, leaders, prefix_lens, ranks, degrees, num_requests)
    mine = _read(arrays, request, NARROW_TOKENS, WIDE_TOKENS)
    piece, head, first_position = _survey(
        mine, arrays, min_piece_tokens, target_pieces, max_pieces,
        PIECE_ALIGN, NARROW_TOKENS, WIDE_TOKENS, CHUNK,
    )  # fmt: skip
    cut = _cut(mine, piece)
    place, totals = _place(
        mine, arrays, piece, head, first_position, first_own_counter,
        NARROW_TOKENS, WIDE_TOKENS, CHUNK,
    )  # fmt: skip

    record = members + (first_position + mine.rank) * MEMBER_FIELDS
    tl.store(record + MEMBER_TOKEN, tl.load(query_start_loc + request))
    tl.store(record + MEMBER_POSITION, mine.prefix + mine.own_len - mine.query_len)
    tl.store(record + MEMBER_LEN, mine.query_len)
    tl.store(record + MEMBER_SLOT, place.own_slot)
    tl.store(record + MEMBER_PIECES, cut.own_pieces)
    if request == 0:
        tl.store(header + HEADER_TILES, totals.tiles)
        tl.store(header + HEADER_PREFIX_TILES, totals.prefix_tiles)
        tl.store(header + HEADER_SLOTS, totals.slots)
        tl.store(header + HEADER_COUNTERS, totals.counters)
        tl.store(header + HEADER_PIECE, piece)
    if mine.is_shared & (mine.rank == mine.unit_rank):
        put_prefix_tiles(tiles, mine, place, piece, NARROW_TOKENS)
    put_own_tiles(tiles, mine, cut, place, piece)
