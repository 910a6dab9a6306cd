"""Triton kernels that group a step's requests, without a host sync: `grouping.py` on the device.

Launches of one program per request. Each program reads a few vectors over all requests, so no scan
across programs is needed. Numbers that change between steps aren't specialised on, so each kernel
is compiled once:

    find_depths      how many leading blocks a request would like to share
    find_leaders     the first request that asks for the same blocks
    measure_groups   degree, rank, gate

All lengths are in tokens, depths in blocks.
"""

import triton
import triton.language as tl

_BLOCKS = tl.constexpr(128)
"""Blocks of a table's row that are compared at a time."""


@triton.jit
def query_lens_of(query_start_loc, requests, num_requests):
    """Query tokens of the requests; 0 after the last."""
    starts = tl.load(query_start_loc + requests, mask=requests < num_requests, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=requests < num_requests, other=0)
    return ends - starts


@triton.jit
def _gated_degree(degree, query_len, SIZES: tl.constexpr):
    """Degree for the gate: a prefix is read once for the members that fit in a tile."""
    per_unit = SIZES.wide_tokens // tl.maximum(query_len, 1)
    return tl.minimum(tl.minimum(degree, per_unit), SIZES.max_degree)


@triton.jit(do_not_specialize=["table_stride", "num_requests", "max_member_tokens", "num_probes"])
def find_depths(
    query_start_loc, seq_lens, block_table, min_prefix_tokens, depths,
    table_stride, num_requests, max_member_tokens, num_probes,
    SIZES: tl.constexpr,
):  # fmt: skip
    """`depths[r]`: leading blocks whose sharing saves r the most reads, 0 for none.

    Only requests with the same number of query tokens share, so that they stack evenly. Binary
    search finds the common blocks with each other request: in a prefix cache, tables with a common
    block have all earlier blocks in common (`find_leaders` checks that). The result is the depth p,
    open by the gate and held by c requests, at which p * (1 - 1/c) is largest.
    """
    request = tl.program_id(0)
    others = tl.arange(0, SIZES.requests)
    exists = others < num_requests
    query_lens = query_lens_of(query_start_loc, others, num_requests)
    lens = tl.load(seq_lens + others, mask=exists, other=0)
    query_len = tl.sum(tl.where(others == request, query_lens, 0))
    takes_part = exists & (query_len > 0) & (query_len <= max_member_tokens)
    takes_part &= query_lens == query_len
    num_blocks = tl.where(takes_part, (lens - query_lens) // SIZES.block_size, 0)
    own_blocks = tl.sum(tl.where(others == request, num_blocks, 0))
    if own_blocks == 0:
        tl.store(depths + request, 0)
    else:
        low = tl.zeros_like(others)
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
        degree = _gated_degree(others + 2, query_len, SIZES)
        least = tl.load(min_prefix_tokens + degree)
        savings = tl.where(deepest_first * SIZES.block_size >= least, savings, 0.0)
        best = tl.argmax(savings, axis=0)
        is_best = (others == best) & (savings > 0.0)
        tl.store(depths + request, tl.sum(tl.where(is_best, deepest_first, 0)))


@triton.jit(do_not_specialize=["table_stride", "num_requests"])
def find_leaders(
    query_start_loc, block_table, depths, leaders, table_stride, num_requests,
    SIZES: tl.constexpr,
):  # fmt: skip
    """`leaders[r]`: the first request that asks for the same blocks as r; r itself if none does.

    A request whose table doesn't begin exactly like its leader's stays alone: tables of sliding
    windows have placeholders for freed blocks.
    """
    request = tl.program_id(0)
    others = tl.arange(0, SIZES.requests)
    depth = tl.load(depths + request)
    leader = request
    if depth > 0:
        own_row = block_table + request.to(tl.int64) * table_stride
        their_depths = tl.load(depths + others, mask=others < num_requests, other=0)
        query_lens = query_lens_of(query_start_loc, others, num_requests)
        query_len = tl.sum(tl.where(others == request, query_lens, 0))
        same_depth = (their_depths == depth) & (query_lens == query_len)
        rows = block_table + others.to(tl.int64) * table_stride
        theirs = tl.load(rows + depth - 1, mask=same_depth, other=-1)
        asks_same = same_depth & (theirs == tl.load(own_row + depth - 1))
        leader = tl.min(tl.where(asks_same, others, request))
        leader_row = block_table + leader.to(tl.int64) * table_stride
        num_unequal = 0
        for start in range(0, depth, _BLOCKS):
            at = start + tl.arange(0, _BLOCKS)
            ours = tl.load(own_row + at, mask=at < depth, other=0)
            first = tl.load(leader_row + at, mask=at < depth, other=0)
            num_unequal += tl.sum((ours != first).to(tl.int32))
        leader = tl.where(num_unequal == 0, leader, request)
    tl.store(leaders + request, leader)


@triton.jit(do_not_specialize=["num_requests"])
def measure_groups(
    query_start_loc, depths, leaders, min_prefix_tokens,
    final_leaders, prefix_lens, ranks, degrees, num_requests,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Size of each request's group and its rank there; groups that the gate closes are dissolved.

    `min_prefix_tokens` is the gate's table by degree, up to the largest that counts.
    """
    request = tl.program_id(0)
    others = tl.arange(0, SIZES.requests)
    leader = tl.load(leaders + request)
    their_leaders = tl.load(leaders + others, mask=others < num_requests, other=-1)
    query_len = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
    is_member = their_leaders == leader
    degree = tl.sum(is_member.to(tl.int32))
    rank = tl.sum((is_member & (others < request)).to(tl.int32))
    prefix_len = tl.load(depths + leader) * SIZES.block_size
    gated_degree = _gated_degree(degree, query_len, SIZES)
    least = tl.load(min_prefix_tokens + gated_degree)
    is_shared = (degree > 1) & (prefix_len >= least)
    tl.store(final_leaders + request, tl.where(is_shared, leader, request))
    tl.store(prefix_lens + request, tl.where(is_shared, prefix_len, 0))
    tl.store(ranks + request, tl.where(is_shared, rank, 0))
    tl.store(degrees + request, tl.where(is_shared, degree, 1))
