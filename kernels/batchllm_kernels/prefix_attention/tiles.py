"""A step's work for the kernel: arrays of int32 records, written on the device.

A *tile* is a range of keys of one block-table row, for some rows (query token x query head of one
KV head). It runs once for each KV head. *Members* are the requests in the order of their groups;
they identify query tokens.

A *unit* is merged at once: the members whose queries are stacked in one prefix tile, or, without a
prefix, the query tokens of a row tile. Each tile of a unit increments the unit's counter, and the
last one merges all of the unit's partials. Where memory isn't ordered well enough for that, a
second launch merges each unit once, at its first tile.
"""

from __future__ import annotations

from typing import Final

TILE_FIELDS: Final = 16
TILE_FLAGS: Final = 0
IS_WIDE: Final = 1
"""Flag: run with the wide tiling."""
IS_FIRST: Final = 2
"""Flag: the first of its unit's tiles."""
TILE_BLOCK_ROW: Final = 1
"""The row of the block table."""
TILE_KV_START: Final = 2
TILE_KV_END: Final = 3
"""Keys [start, end) of the context; none if end <= start."""
TILE_ROWS_FIRST: Final = 4
"""The first of the tile's members."""
TILE_ROWS_MEMBERS: Final = 5
TILE_ROWS_LEN: Final = 6
"""Query tokens stacked for each member, the same number for all members of a group."""
TILE_ROW_OFFSET: Final = 7
"""Query tokens of the member before the tile's first."""
TILE_SLOT: Final = 8
"""Slot of the first token's partials; the others' follow. -1: the tile writes the output."""
TILE_COUNTER: Final = 9
TILE_NUM_PARTIALS: Final = 10
"""Tiles of the unit, for each KV head."""
TILE_UNIT_FIRST: Final = 11
TILE_UNIT_MEMBERS: Final = 12
TILE_UNIT_LEN: Final = 13
"""As for the tile's rows, but of the unit."""
TILE_PREFIX_SLOT: Final = 14
"""The unit's first slot of prefix partials: UNIT_MEMBERS * UNIT_LEN slots for each piece."""
TILE_PREFIX_PIECES: Final = 15

MEMBER_FIELDS: Final = 8
MEMBER_TOKEN: Final = 0
"""The request's first query token."""
MEMBER_POSITION: Final = 1
"""That token's position in the context."""
MEMBER_LEN: Final = 2
"""Query tokens."""
MEMBER_SLOT: Final = 3
"""The first slot of own partials: MEMBER_LEN slots for each piece."""
MEMBER_PIECES: Final = 4
"""Pieces of its own part."""

HEADER_FIELDS: Final = 8
HEADER_TILES: Final = 0
HEADER_PREFIX_TILES: Final = 1
HEADER_SLOTS: Final = 2
HEADER_COUNTERS: Final = 3
"""Counters in use after those of grouped units."""
HEADER_PIECE: Final = 4
"""Tokens of a piece."""
