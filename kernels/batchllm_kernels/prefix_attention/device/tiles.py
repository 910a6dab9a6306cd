"""A step's work for the kernel: arrays of int32 records, which `layout.py` writes.

A *tile* is a range of keys of one block-table row, for some rows (query token x query head of one
KV head). It runs once for each KV head. *Members* are the requests in the order of their groups;
they identify query tokens.

A *unit* is merged at once: the members whose queries are stacked in one prefix tile, or, without a
prefix, the query tokens of a row tile. Each tile of a unit increments the unit's counter, and the
last one merges all of the unit's partials. Where memory isn't ordered well enough for that, a
second launch merges each unit once, at its first tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(16)
MEMBER_FIELDS = tl.constexpr(8)
HEADER_FIELDS = tl.constexpr(8)
IS_WIDE = tl.constexpr(1)
"""Flag: run with the wide tiling."""
IS_FIRST = tl.constexpr(2)
"""Flag: the first of its unit's tiles."""


class Tile(NamedTuple):
    """The record of a tile, or of several: its fields in the array's order."""

    flags: tl.tensor
    block_row: tl.tensor
    """The row of the block table."""
    kv_start: tl.tensor
    kv_end: tl.tensor
    """Keys [start, end) of the context; none if end <= start."""
    rows_first: tl.tensor
    """The first of the tile's members."""
    rows_members: tl.tensor
    rows_len: tl.tensor
    """Query tokens stacked for each member, the same number for all members of a group."""
    row_offset: tl.tensor
    """Query tokens of the member before the tile's first."""
    slot: tl.tensor
    """Slot of the first token's partials; the others' follow. -1: the tile writes the output."""
    counter: tl.tensor
    num_partials: tl.tensor
    """Tiles of the unit, for each KV head."""
    unit_first: tl.tensor
    unit_members: tl.tensor
    unit_len: tl.tensor
    """As for the tile's rows, but of the unit."""
    prefix_slot: tl.tensor
    """The unit's first slot of prefix partials: unit_members * unit_len slots for each piece."""
    prefix_pieces: tl.tensor


class Member(NamedTuple):
    """The record of a member, or of several."""

    token: tl.tensor
    """The request's first query token."""
    position: tl.tensor
    """That token's position in the context."""
    query_len: tl.tensor
    slot: tl.tensor
    """The first slot of own partials: query_len slots for each piece."""
    pieces: tl.tensor
    """Pieces of its own part."""


class Header(NamedTuple):
    """Totals of the step."""

    tiles: tl.tensor
    prefix_tiles: tl.tensor
    slots: tl.tensor
    counters: tl.tensor
    """Counters in use after those of grouped units."""
    piece: tl.tensor
    """Tokens of a piece."""


@triton.jit
def read_tile(tiles, idx):
    """The tile at `idx`. Fields that aren't used aren't loaded."""
    at = tiles + idx * TILE_FIELDS
    return Tile(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
        tl.load(at + 10), tl.load(at + 11), tl.load(at + 12), tl.load(at + 13), tl.load(at + 14),
        tl.load(at + 15),
    )  # fmt: skip


@triton.jit
def read_members(members, idx, mask):
    """The members at `idx`; zeros where the mask is false."""
    at = members + idx * MEMBER_FIELDS
    return Member(
        tl.load(at, mask=mask, other=0),
        tl.load(at + 1, mask=mask, other=0),
        tl.load(at + 2, mask=mask, other=0),
        tl.load(at + 3, mask=mask, other=0),
        tl.load(at + 4, mask=mask, other=0),
    )


@triton.jit
def write_record(array, idx, record, mask, NUM_FIELDS: tl.constexpr, STRIDE: tl.constexpr):
    """Write the fields of the record at `idx`, or of several records."""
    for field in tl.static_range(NUM_FIELDS):
        tl.store(array + idx * STRIDE + field, record[field] + idx * 0, mask=mask)
