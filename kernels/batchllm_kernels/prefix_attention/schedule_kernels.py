"""Triton kernels that lay out a step's work on the device, without a host sync.

Four launches of one program per request. Each program reads a few vectors over all requests, so no
scan across programs is needed. Numbers that change between steps aren't specialised on, so each
kernel is compiled once:

    find_depths      how many leading blocks a request would like to share
    find_leaders     the first request that asks for the same blocks
    measure_groups   degree, rank, gate
    lay_out          pieces, tiles, slots for partials

`schedule.py` describes the arrays. All lengths are in tokens, depths in blocks.
"""

import triton
import triton.language as tl

from batchllm_kernels.prefix_attention.tile_constants import (
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


@triton.jit
def _query_lens(query_start_loc, requests, num_requests):
    starts = tl.load(query_start_loc + requests, mask=requests < num_requests, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=requests < num_requests, other=0)
    return ends - starts


@triton.jit
def _gated_degree(degree, query_len, WIDE_TOKENS: tl.constexpr, MAX_DEGREE: tl.constexpr):
    """Degree for the gate: a prefix is read once for the members that fit in a tile."""
    per_unit = WIDE_TOKENS // tl.maximum(query_len, 1)
    return tl.minimum(tl.minimum(degree, per_unit), MAX_DEGREE)


@triton.jit(do_not_specialize=["table_stride", "num_requests", "max_member_tokens", "num_probes"])
def find_depths(
    query_start_loc,
    seq_lens,
    block_table,
    min_prefix_tokens,
    depths,
    table_stride,
    num_requests,
    max_member_tokens,
    num_probes,
    MAX_DEGREE: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """`depths[r]`: leading blocks whose sharing saves r the most reads, 0 for none.

    Only requests with the same number of query tokens share, so that they stack evenly. Binary
    search finds the common blocks with each other request: in a prefix cache, tables with a common
    block have all earlier blocks in common (`find_leaders` checks that). The result is the depth p,
    open by the gate and held by c requests, at which p * (1 - 1/c) is largest.
    """
    request = tl.program_id(0)
    others = tl.arange(0, REQUESTS)
    exists = others < num_requests
    query_lens = _query_lens(query_start_loc, others, num_requests)
    lens = tl.load(seq_lens + others, mask=exists, other=0)
    query_len = tl.sum(tl.where(others == request, query_lens, 0))
    takes_part = exists & (query_len > 0) & (query_len <= max_member_tokens)
    takes_part &= query_lens == query_len
    num_blocks = tl.where(takes_part, (lens - query_lens) // BLOCK_SIZE, 0)
    own_blocks = tl.sum(tl.where(others == request, num_blocks, 0))
    if own_blocks == 0:
        tl.store(depths + request, 0)
    else:
        low = tl.zeros([REQUESTS], tl.int32)
        high = tl.minimum(num_blocks, own_blocks)
        high = tl.where(others == request, 0, high)  # not with itself
        own_row = block_table + request.to(tl.int64) * table_stride
        rows = block_table + others.to(tl.int64) * table_stride
        for _ in range(num_probes):
            is_open = low < high
            middle = (low + high) // 2
            theirs = tl.load(rows + middle, mask=is_open, other=-1)
            ours = tl.load(own_row + middle, mask=is_open, other=-2)
            low = tl.where(is_open & (theirs == ours), middle + 1, low)
            high = tl.where(is_open & (theirs != ours), middle, high)
        deepest_first = tl.sort(low, descending=True)
        sharers = (others + 1).to(tl.float32)
        savings = deepest_first.to(tl.float32) * (sharers / (sharers + 1.0))
        degree = _gated_degree(others + 2, query_len, WIDE_TOKENS, MAX_DEGREE)
        least = tl.load(min_prefix_tokens + degree)
        savings = tl.where(deepest_first * BLOCK_SIZE >= least, savings, 0.0)
        best = tl.argmax(savings, axis=0)
        is_best = (others == best) & (savings > 0.0)
        tl.store(depths + request, tl.sum(tl.where(is_best, deepest_first, 0)))


@triton.jit(do_not_specialize=["table_stride", "num_requests"])
def find_leaders(
    query_start_loc,
    block_table,
    depths,
    leaders,
    table_stride,
    num_requests,
    REQUESTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`leaders[r]`: the first request that asks for the same blocks as r; r itself if none does.

    A request whose table doesn't begin exactly like its leader's stays alone: tables of sliding
    windows have placeholders for freed blocks.
    """
    request = tl.program_id(0)
    others = tl.arange(0, REQUESTS)
    depth = tl.load(depths + request)
    leader = request
    if depth > 0:
        own_row = block_table + request.to(tl.int64) * table_stride
        their_depths = tl.load(depths + others, mask=others < num_requests, other=0)
        query_lens = _query_lens(query_start_loc, others, num_requests)
        query_len = tl.sum(tl.where(others == request, query_lens, 0))
        same_depth = (their_depths == depth) & (query_lens == query_len)
        rows = block_table + others.to(tl.int64) * table_stride
        theirs = tl.load(rows + depth - 1, mask=same_depth, other=-1)
        asks_same = same_depth & (theirs == tl.load(own_row + depth - 1))
        leader = tl.min(tl.where(asks_same, others, request))
        leader_row = block_table + leader.to(tl.int64) * table_stride
        num_unequal = 0
        for start in range(0, depth, BLOCKS):
            at = start + tl.arange(0, BLOCKS)
            ours = tl.load(own_row + at, mask=at < depth, other=0)
            first = tl.load(leader_row + at, mask=at < depth, other=0)
            num_unequal += tl.sum((ours != first).to(tl.int32))
        leader = tl.where(num_unequal == 0, leader, request)
    tl.store(leaders + request, leader)


@triton.jit(do_not_specialize=["num_requests"])
def measure_groups(
    query_start_loc,
    depths,
    leaders,
    min_prefix_tokens,
    final_leaders,
    prefix_lens,
    ranks,
    degrees,
    num_requests,
    MAX_DEGREE: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Size of each request's group and its rank there; groups that the gate closes are dissolved.

    `min_prefix_tokens` is the gate's table by degree, up to MAX_DEGREE.
    """
    request = tl.program_id(0)
    others = tl.arange(0, REQUESTS)
    leader = tl.load(leaders + request)
    their_leaders = tl.load(leaders + others, mask=others < num_requests, other=-1)
    query_len = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
    is_member = their_leaders == leader
    degree = tl.sum(is_member.to(tl.int32))
    rank = tl.sum((is_member & (others < request)).to(tl.int32))
    prefix_len = tl.load(depths + leader) * BLOCK_SIZE
    gated_degree = _gated_degree(degree, query_len, WIDE_TOKENS, MAX_DEGREE)
    least = tl.load(min_prefix_tokens + gated_degree)
    is_shared = (degree > 1) & (prefix_len >= least)
    tl.store(final_leaders + request, tl.where(is_shared, leader, request))
    tl.store(prefix_lens + request, tl.where(is_shared, prefix_len, 0))
    tl.store(ranks + request, tl.where(is_shared, rank, 0))
    tl.store(degrees + request, tl.where(is_shared, degree, 1))


@triton.jit
def _of(values, requests, request):
    """The entry of one request in a vector over all."""
    return tl.sum(tl.where(requests == request, values, 0))


@triton.jit
def _before(values, requests, request):
    """Sum over the requests before one."""
    return tl.sum(tl.where(requests < request, values, 0))


@triton.jit
def _put(tiles, at, field: tl.constexpr, value, mask):
    tl.store(tiles + at * TILE_FIELDS + field, value + tl.zeros_like(at), mask=mask)


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
    query_start_loc,
    seq_lens,
    leaders,
    prefix_lens,
    ranks,
    degrees,
    header,
    tiles,
    members,
    num_requests,
    min_piece_tokens,
    target_pieces,
    max_pieces,
    first_own_counter,
    PIECE_ALIGN: tl.constexpr,
    NARROW_TOKENS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Write each request's tiles: those of its own part, and of its unit's prefix if it leads."""
    request = tl.program_id(0)
    others = tl.arange(0, REQUESTS)
    exists = others < num_requests
    query_lens = _query_lens(query_start_loc, others, num_requests)
    prefixes = tl.load(prefix_lens + others, mask=exists, other=0)
    rank = tl.load(ranks + others, mask=exists, other=0)
    degree = tl.load(degrees + others, mask=exists, other=1)
    their_leaders = tl.load(leaders + others, mask=exists, other=-1)
    own_lens = tl.load(seq_lens + others, mask=exists, other=0) - prefixes

    is_shared = prefixes > 0
    is_wide = query_lens > NARROW_TOKENS
    unit_len = tl.where(is_shared, query_lens, 1)
    tile_tokens = tl.where(is_wide, WIDE_TOKENS, NARROW_TOKENS)
    row_tiles = (query_lens + tile_tokens - 1) // tile_tokens
    per_unit = tl.where(is_shared, WIDE_TOKENS // tl.maximum(unit_len, 1), 1)
    is_head = is_shared & (rank % per_unit == 0)
    head_prefixes = tl.where(is_head, prefixes, 0)

    # Pieces of about equal length fill the device: few requests are split, many aren't. One program
    # merges all pieces of a unit, so there are at most as many as programs.
    work = tl.sum(row_tiles.to(tl.int64) * own_lens) + tl.sum(head_prefixes)
    longest = tl.max(tl.where(query_lens > 0, tl.maximum(own_lens, prefixes), 0))
    piece = tl.maximum((work + target_pieces - 1) // target_pieces, min_piece_tokens)
    piece = tl.maximum(piece, (longest + max_pieces - 1) // max_pieces)
    piece = ((piece + PIECE_ALIGN - 1) // PIECE_ALIGN * PIECE_ALIGN).to(tl.int32)
    own_pieces = tl.where(query_lens > 0, (own_lens + piece - 1) // piece, 0)
    prefix_pieces = (head_prefixes + piece - 1) // piece
    is_partial = is_shared | (own_pieces > 1)

    unit_members = tl.minimum(per_unit, degree - rank // per_unit * per_unit)
    prefix_slots = tl.where(is_head, unit_members * unit_len * prefix_pieces, 0)
    own_slots = tl.where(is_partial, query_lens * own_pieces, 0)
    own_tiles = row_tiles * own_pieces
    wide_tiles = tl.where(is_wide, own_tiles, 0)
    narrow_tiles = tl.where(is_wide, 0, own_tiles)
    own_counters = tl.where(is_partial & ~is_shared, row_tiles, 0)
    num_prefix_tiles = tl.sum(prefix_pieces)
    num_wide_tiles = tl.sum(wide_tiles)

    my_query_len = _of(query_lens, others, request)
    my_leader = tl.load(leaders + request)
    my_rank = _of(rank, others, request)
    my_per_unit = _of(per_unit, others, request)
    my_own_pieces = _of(own_pieces, others, request)
    my_prefix = _of(prefixes, others, request)
    my_own_len = _of(own_lens, others, request)
    shared = my_prefix > 0
    first_position = tl.sum((exists & (their_leaders < my_leader)).to(tl.int32))
    unit_rank = my_rank // my_per_unit * my_per_unit
    unit_first = first_position + unit_rank
    in_unit = (
        exists & (their_leaders == my_leader) & (rank // my_per_unit * my_per_unit == unit_rank)
    )
    is_unit_head = in_unit & (rank == unit_rank)
    my_prefix_pieces = tl.sum(tl.where(is_unit_head, prefix_pieces, 0))
    num_partials = my_prefix_pieces + tl.sum(tl.where(in_unit, own_pieces, 0))
    head = tl.sum(tl.where(is_unit_head, others, 0))
    prefix_slot = _before(prefix_slots, others, head)
    own_slot = tl.sum(prefix_slots) + _before(own_slots, others, request)
    my_unit_members = _of(unit_members, others, request)
    my_unit_len = _of(unit_len, others, request)

    query_start = tl.load(query_start_loc + request)
    record = members + (first_position + my_rank) * MEMBER_FIELDS
    tl.store(record + MEMBER_TOKEN, query_start)
    tl.store(record + MEMBER_POSITION, my_prefix + my_own_len - my_query_len)
    tl.store(record + MEMBER_LEN, my_query_len)
    tl.store(record + MEMBER_SLOT, own_slot)
    tl.store(record + MEMBER_PIECES, my_own_pieces)
    if request == 0:
        tl.store(header + HEADER_TILES, num_prefix_tiles + num_wide_tiles + tl.sum(narrow_tiles))
        tl.store(header + HEADER_PREFIX_TILES, num_prefix_tiles)
        tl.store(header + HEADER_SLOTS, tl.sum(prefix_slots) + tl.sum(own_slots))
        tl.store(header + HEADER_COUNTERS, tl.sum(own_counters))
        tl.store(header + HEADER_PIECE, piece)

    if shared & (my_rank == unit_rank):
        first_tile = _before(prefix_pieces, others, request)
        for start in range(0, my_prefix_pieces, _EMIT):
            idx = start + tl.arange(0, _EMIT)
            mask = idx < my_prefix_pieces
            at = first_tile + idx
            rows = my_unit_members * my_unit_len
            flags = (idx == 0).to(tl.int32) * IS_FIRST + (rows > NARROW_TOKENS).to(
                tl.int32
            ) * IS_WIDE
            _put(tiles, at, TILE_FLAGS, flags, mask)
            _put(tiles, at, TILE_BLOCK_ROW, request, mask)
            _put(tiles, at, TILE_KV_START, idx * piece, mask)
            _put(tiles, at, TILE_KV_END, tl.minimum(idx * piece + piece, my_prefix), mask)
            _put(tiles, at, TILE_ROWS_FIRST, unit_first, mask)
            _put(tiles, at, TILE_ROWS_MEMBERS, my_unit_members, mask)
            _put(tiles, at, TILE_ROWS_LEN, my_unit_len, mask)
            _put(tiles, at, TILE_ROW_OFFSET, 0, mask)
            _put(tiles, at, TILE_SLOT, prefix_slot + idx * rows, mask)
            _put(tiles, at, TILE_COUNTER, unit_first, mask)
            _put(tiles, at, TILE_NUM_PARTIALS, num_partials, mask)
            _put(tiles, at, TILE_UNIT_FIRST, unit_first, mask)
            _put(tiles, at, TILE_UNIT_MEMBERS, my_unit_members, mask)
            _put(tiles, at, TILE_UNIT_LEN, my_unit_len, mask)
            _put(tiles, at, TILE_PREFIX_SLOT, prefix_slot, mask)
            _put(tiles, at, TILE_PREFIX_PIECES, my_prefix_pieces, mask)

    wide = my_query_len > NARROW_TOKENS
    first_wide = num_prefix_tiles + _before(wide_tiles, others, request)
    first_narrow = num_prefix_tiles + num_wide_tiles + _before(narrow_tiles, others, request)
    first_tile = tl.where(wide, first_wide, first_narrow)
    first_counter = first_own_counter + _before(own_counters, others, request)
    num_own_tiles = _of(own_tiles, others, request)
    my_tile_tokens = _of(tile_tokens, others, request)
    my_end = my_prefix + my_own_len
    partial = shared | (my_own_pieces > 1)
    for start in range(0, num_own_tiles, _EMIT):
        idx = start + tl.arange(0, _EMIT)
        mask = idx < num_own_tiles
        at = first_tile + idx
        row_tile = idx // my_own_pieces
        piece_idx = idx % my_own_pieces
        offset = row_tile * my_tile_tokens
        num_tokens = tl.minimum(my_tile_tokens, my_query_len - offset)
        # The tile's last query sees keys up to its own; later pieces are empty.
        visible_end = my_end - my_query_len + offset + num_tokens
        kv_start = my_prefix + piece_idx * piece
        slot = tl.where(partial, own_slot + piece_idx * my_query_len + offset, -1)
        is_first = (piece_idx == 0) & ~shared
        flags = is_first.to(tl.int32) * IS_FIRST + wide.to(tl.int32) * IS_WIDE
        _put(tiles, at, TILE_FLAGS, flags, mask)
        _put(tiles, at, TILE_BLOCK_ROW, request, mask)
        _put(tiles, at, TILE_KV_START, kv_start, mask)
        _put(tiles, at, TILE_KV_END, tl.minimum(kv_start + piece, visible_end), mask)
        _put(tiles, at, TILE_ROWS_FIRST, first_position + my_rank, mask)
        _put(tiles, at, TILE_ROWS_MEMBERS, 1, mask)
        _put(tiles, at, TILE_ROWS_LEN, num_tokens, mask)
        _put(tiles, at, TILE_ROW_OFFSET, offset, mask)
        _put(tiles, at, TILE_SLOT, slot, mask)
        _put(tiles, at, TILE_COUNTER, tl.where(shared, unit_first, first_counter + row_tile), mask)
        _put(tiles, at, TILE_NUM_PARTIALS, tl.where(shared, num_partials, my_own_pieces), mask)
        _put(tiles, at, TILE_UNIT_FIRST, unit_first, mask)
        _put(tiles, at, TILE_UNIT_MEMBERS, my_unit_members, mask)
        _put(tiles, at, TILE_UNIT_LEN, tl.where(shared, my_unit_len, num_tokens), mask)
        _put(tiles, at, TILE_PREFIX_SLOT, prefix_slot, mask)
        _put(tiles, at, TILE_PREFIX_PIECES, my_prefix_pieces, mask)
