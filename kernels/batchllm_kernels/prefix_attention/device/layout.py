"""The Triton kernel that cuts a step into tiles, launched after those of `grouping.py`.

`schedule.py` has the arrays, `tiles.py` describes their records. All lengths are in tokens.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.device.grouping import query_lens_of
from batchllm_kernels.prefix_attention.device.tiles import (
    HEADER_FIELDS,
    IS_FIRST,
    IS_WIDE,
    MEMBER_FIELDS,
    TILE_FIELDS,
    Header,
    Member,
    Tile,
    write_record,
)

_EMIT = tl.constexpr(32)
"""Tiles that a program writes at a time."""


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


@triton.jit
def _read(arrays, idx, SIZES: tl.constexpr):
    """The requests at `idx`, with their units."""
    exists = idx < arrays.num_requests
    query_len = query_lens_of(arrays.query_start_loc, idx, arrays.num_requests)
    prefix = tl.load(arrays.prefix_lens + idx, mask=exists, other=0)
    rank = tl.load(arrays.ranks + idx, mask=exists, other=0)
    degree = tl.load(arrays.degrees + idx, mask=exists, other=1)
    leader = tl.load(arrays.leaders + idx, mask=exists, other=-1)
    own_len = tl.load(arrays.seq_lens + idx, mask=exists, other=0) - prefix

    is_shared = prefix > 0
    is_wide = query_len > SIZES.narrow_tokens
    tile_tokens = tl.where(is_wide, SIZES.wide_tokens, SIZES.narrow_tokens)
    row_tiles = (query_len + tile_tokens - 1) // tile_tokens
    unit_len = tl.where(is_shared, query_len, 1)
    per_unit = tl.where(is_shared, SIZES.wide_tokens // tl.maximum(unit_len, 1), 1)
    unit_rank = rank // per_unit * per_unit
    unit_members = tl.minimum(per_unit, degree - unit_rank)
    head_prefix = tl.where(rank == unit_rank, prefix, 0)
    return _Requests(
        idx, exists, query_len, prefix, rank, leader, own_len, is_shared, is_wide,
        tile_tokens, row_tiles, unit_rank, unit_len, unit_members, head_prefix,
    )  # fmt: skip


@triton.jit
def _cut(requests, piece):
    own_pieces = tl.where(requests.query_len > 0, (requests.own_len + piece - 1) // piece, 0)
    prefix_pieces = (requests.head_prefix + piece - 1) // piece
    is_partial = requests.is_shared | (own_pieces > 1)
    own_tiles = requests.row_tiles * own_pieces
    return _Cut(
        own_pieces,
        prefix_pieces,
        requests.unit_members * requests.unit_len * prefix_pieces,
        tl.where(is_partial, requests.query_len * own_pieces, 0),
        tl.where(requests.is_wide, own_tiles, 0),
        tl.where(requests.is_wide, 0, own_tiles),
        tl.where(is_partial & (requests.is_shared == 0), requests.row_tiles, 0),
    )


@triton.jit
def _add(sums, cuts, mask):
    """The sums with those of the cuts where the mask is true."""
    return _Cut(
        sums.own_pieces + tl.sum(tl.where(mask, cuts.own_pieces, 0)),
        sums.prefix_pieces + tl.sum(tl.where(mask, cuts.prefix_pieces, 0)),
        sums.prefix_slots + tl.sum(tl.where(mask, cuts.prefix_slots, 0)),
        sums.own_slots + tl.sum(tl.where(mask, cuts.own_slots, 0)),
        sums.wide_tiles + tl.sum(tl.where(mask, cuts.wide_tiles, 0)),
        sums.narrow_tiles + tl.sum(tl.where(mask, cuts.narrow_tiles, 0)),
        sums.own_counters + tl.sum(tl.where(mask, cuts.own_counters, 0)),
    )


@triton.jit
def _survey(mine, arrays, min_piece_tokens, target_pieces, max_pieces, SIZES: tl.constexpr):
    """(tokens of a piece, the head of the request's unit, its group's first position).

    Pieces of about equal length fill the device: few requests are split, many aren't. One program
    merges all pieces of a unit, so there are at most as many as programs.
    """
    work = tl.full([], 0, tl.int64)
    longest = 0
    head = 0
    first_position = 0
    for first in range(0, arrays.num_requests, SIZES.chunk):
        some = _read(arrays, first + tl.arange(0, SIZES.chunk), SIZES)
        work += tl.sum(some.row_tiles.to(tl.int64) * some.own_len + some.head_prefix)
        context = tl.maximum(some.own_len, some.prefix)
        longest = tl.maximum(longest, tl.max(tl.where(some.query_len > 0, context, 0)))
        is_head = some.exists & (some.leader == mine.leader) & (some.rank == mine.unit_rank)
        head += tl.sum(tl.where(is_head, some.idx, 0))
        first_position += tl.sum((some.exists & (some.leader < mine.leader)).to(tl.int32))
    piece = tl.maximum((work + target_pieces - 1) // target_pieces, min_piece_tokens)
    piece = tl.maximum(piece, (longest + max_pieces - 1) // max_pieces)
    piece = ((piece + SIZES.piece_align - 1) // SIZES.piece_align * SIZES.piece_align).to(tl.int32)
    return piece, head, first_position


@triton.jit
def _place(mine, arrays, piece, head, first_position, first_own_counter, SIZES: tl.constexpr):
    """(place of the request, header of the step)."""
    nothing = mine.idx * 0
    zero = _Cut(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    total, before, unit = zero, zero, zero
    prefix_slots_before = nothing
    for first in range(0, arrays.num_requests, SIZES.chunk):
        some = _read(arrays, first + tl.arange(0, SIZES.chunk), SIZES)
        cuts = _cut(some, piece)
        in_unit = (some.leader == mine.leader) & (some.unit_rank == mine.unit_rank)
        total = _add(total, cuts, some.exists)
        before = _add(before, cuts, some.exists & (some.idx < mine.idx))
        unit = _add(unit, cuts, some.exists & in_unit)
        prefix_slots_before += tl.sum(tl.where(some.idx < head, cuts.prefix_slots, 0))
    prefix_pieces = (mine.prefix + piece - 1) // piece
    prefix_and_wide = total.prefix_pieces + total.wide_tiles
    place = _Place(
        first_position,
        first_position + mine.unit_rank,
        prefix_pieces,
        prefix_pieces + unit.own_pieces,
        prefix_slots_before,
        total.prefix_slots + before.own_slots,
        before.prefix_pieces,
        tl.where(
            mine.is_wide,
            total.prefix_pieces + before.wide_tiles,
            prefix_and_wide + before.narrow_tiles,
        ),
        first_own_counter + before.own_counters,
    )
    tiles = prefix_and_wide + total.narrow_tiles
    slots = total.prefix_slots + total.own_slots
    return place, Header(tiles, total.prefix_pieces, slots, total.own_counters, piece)


@triton.jit
def _write_prefix_tiles(tiles, mine, place, piece, SIZES: tl.constexpr):
    """Write the tiles of the unit's prefix, which the request leads."""
    rows = mine.unit_members * mine.unit_len
    for start in range(0, place.prefix_pieces, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        flags = (idx == 0).to(tl.int32) * IS_FIRST + (rows > SIZES.narrow_tokens).to(
            tl.int32
        ) * IS_WIDE
        kv_start = idx * piece
        tile = Tile(
            flags, mine.idx, kv_start, tl.minimum(kv_start + piece, mine.prefix),
            place.unit_first, mine.unit_members, mine.unit_len, 0,
            place.prefix_slot + idx * rows, place.unit_first, place.num_partials,
            place.unit_first, mine.unit_members, mine.unit_len,
            place.prefix_slot, place.prefix_pieces,
        )  # fmt: skip
        mask = idx < place.prefix_pieces
        write_record(tiles, place.first_prefix_tile + idx, tile, mask, 16, TILE_FIELDS)


@triton.jit
def _write_own_tiles(tiles, mine, cut, place, piece):
    """Write the tiles of the request's own part."""
    num_tiles = cut.wide_tiles + cut.narrow_tiles
    end = mine.prefix + mine.own_len
    is_partial = mine.is_shared | (cut.own_pieces > 1)
    for start in range(0, num_tiles, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        row_tile = idx // cut.own_pieces
        piece_idx = idx % cut.own_pieces
        offset = row_tile * mine.tile_tokens
        num_tokens = tl.minimum(mine.tile_tokens, mine.query_len - offset)
        # The tile's last query sees keys up to its own; later pieces are empty.
        visible_end = end - mine.query_len + offset + num_tokens
        kv_start = mine.prefix + piece_idx * piece
        is_first = (piece_idx == 0) & (mine.is_shared == 0)
        tile = Tile(
            is_first.to(tl.int32) * IS_FIRST + mine.is_wide.to(tl.int32) * IS_WIDE,
            mine.idx, kv_start, tl.minimum(kv_start + piece, visible_end),
            place.first_position + mine.rank, 1, num_tokens, offset,
            tl.where(is_partial, place.own_slot + piece_idx * mine.query_len + offset, -1),
            tl.where(mine.is_shared, place.unit_first, place.own_counter + row_tile),
            tl.where(mine.is_shared, place.num_partials, cut.own_pieces),
            place.unit_first, mine.unit_members,
            tl.where(mine.is_shared, mine.unit_len, num_tokens),
            place.prefix_slot, place.prefix_pieces,
        )  # fmt: skip
        write_record(tiles, place.first_own_tile + idx, tile, idx < num_tiles, 16, TILE_FIELDS)


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
    SIZES: tl.constexpr,
):  # fmt: skip
    """Write each request's tiles: those of its own part, and of its unit's prefix if it leads.

    Each program reads all requests twice, a chunk at a time, so that any number fits its registers.
    """
    request = tl.program_id(0)
    arrays = _Arrays(query_start_loc, seq_lens, leaders, prefix_lens, ranks, degrees, num_requests)
    mine = _read(arrays, request, SIZES)
    piece, head, first_position = _survey(
        mine, arrays, min_piece_tokens, target_pieces, max_pieces, SIZES
    )
    cut = _cut(mine, piece)
    place, totals = _place(mine, arrays, piece, head, first_position, first_own_counter, SIZES)
    member = Member(
        tl.load(query_start_loc + request),
        mine.prefix + mine.own_len - mine.query_len,
        mine.query_len,
        place.own_slot,
        cut.own_pieces,
    )
    write_record(members, first_position + mine.rank, member, True, 5, MEMBER_FIELDS)
    if request == 0:
        write_record(header, request, totals, True, 5, HEADER_FIELDS)
    if mine.is_shared & (mine.rank == mine.unit_rank):
        _write_prefix_tiles(tiles, mine, place, piece, SIZES)
    _write_own_tiles(tiles, mine, cut, place, piece)
