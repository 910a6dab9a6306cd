"""What the device lays out: the groups of the reference, every key seen once, nothing too large."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import AttentionCase, Group, make_case
from support.attention_checks import header_of
from support.levels import examples

from batchllm_kernels.prefix_attention import (
    ArchConfig,
    AttentionShape,
    BatchLimits,
    Gate,
    PagedBatch,
    SharedPrefix,
    find_shared_prefixes,
    load_config,
)
from batchllm_kernels.prefix_attention.config import SplitRule
from batchllm_kernels.prefix_attention.device.tiles import IS_FIRST, Member, Tile
from batchllm_kernels.prefix_attention.schedule import Schedule

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
CONFIG = load_config("cpu")
PIECE_ALIGN = 128

members = st.tuples(st.sampled_from([0, 1, 16, 47, 300]), st.sampled_from([1, 1, 1, 2, 9, 40]))
groups = st.lists(
    st.builds(
        Group,
        st.sampled_from([0, 16, 64, 400]),
        st.lists(members, min_size=1, max_size=5).map(tuple),
    ),
    max_size=3,
)
configs = st.builds(
    lambda gate, split: replace(CONFIG, gate=gate, split=split),
    st.sampled_from([Gate({2: 1}, 64), Gate({2: 1}, 1), Gate({2: 64, 4: 16}, 4), Gate({}, 1)]),
    st.sampled_from([SplitRule(1, 4), SplitRule(64, 1), SplitRule(256, 8)]),
)


def built(batch: PagedBatch, config: ArchConfig, shape: AttentionShape = SHAPE) -> Schedule:
    limits = BatchLimits(batch.num_requests, int(batch.query_start_loc[-1]))
    schedule = Schedule(shape, limits, config, CPU)
    schedule.build(batch)
    return schedule


def schedule_of(case: AttentionCase, config: ArchConfig) -> Schedule:
    return built(case.batch, config, case.shape)


def tiles_of(schedule: Schedule) -> list[Tile]:
    return [Tile(*row) for row in schedule.tiles[: header_of(schedule).tiles].tolist()]


def prefix_tiles_of(schedule: Schedule) -> list[Tile]:
    return tiles_of(schedule)[: header_of(schedule).prefix_tiles]


def members_of(tile: Tile, schedule: Schedule) -> list[Member]:
    records = schedule.members[tile.rows_first :][: tile.rows_members].tolist()
    return [Member(*record[: len(Member._fields)]) for record in records]


def rows_of(tile: Tile, schedule: Schedule) -> list[tuple[int, int]]:
    """(query token, its position) of a tile's rows, from the members' records."""
    return [
        (member.token + token, member.position + token)
        for member in members_of(tile, schedule)
        for token in range(tile.row_offset, tile.row_offset + tile.rows_len)
        if token < member.query_len
    ]


@settings(max_examples=examples(25, few=5))
@given(groups, configs, st.integers(0, 3), st.integers(0, 1000))
def test_every_query_sees_each_of_its_keys_once(
    given_groups: list[Group], config: ArchConfig, num_padding: int, seed: int
) -> None:
    case = make_case(SHAPE, given_groups, seed=seed, num_padding=num_padding)
    schedule = schedule_of(case, config)
    header = header_of(schedule)
    assert header.tiles <= schedule.capacity.tiles
    assert header.slots <= schedule.capacity.slots
    assert header.counters + case.batch.num_requests <= len(schedule.counters)
    assert header.piece % PIECE_ALIGN == 0

    table, starts = case.batch.block_table, case.batch.query_start_loc.tolist()
    spans = enumerate(itertools.pairwise(starts))
    owner = {token: request for request, span in spans for token in range(*span)}
    seen: Counter[tuple[int, int]] = Counter()
    slots: Counter[int] = Counter()
    partials: dict[int, list[int]] = {}
    firsts: Counter[int] = Counter()
    for tile in tiles_of(schedule):
        assert tile.kv_end - tile.kv_start <= header.piece
        for token, position in rows_of(tile, schedule):
            row = table[owner[token]]
            for key in range(tile.kv_start, min(tile.kv_end, position + 1)):
                # The tile's own table row leads to the same block.
                block = key // SHAPE.block_size
                assert row[block] == table[tile.block_row, block]
                seen[token, key] += 1
        if tile.slot >= 0:
            slots.update(range(tile.slot, tile.slot + tile.rows_members * tile.rows_len))
            firsts[tile.counter] += bool(tile.flags & IS_FIRST.value)
            partials.setdefault(tile.counter, []).append(tile.num_partials)
    wanted = {
        (token, key)
        for token, request in owner.items()
        for key in range(int(case.batch.seq_lens[request]) - (starts[request + 1] - token) + 1)
    }
    assert seen == Counter(wanted)
    assert all(count == 1 for count in slots.values())
    assert all(slot < header.slots for slot in slots)
    assert all(firsts[counter] == 1 for counter in partials)
    assert all(counts == [len(counts)] * len(counts) for counts in partials.values())


def groups_of(schedule: Schedule, batch: PagedBatch) -> list[SharedPrefix]:
    """The groups that the device found, read off its prefix tiles."""
    tiles = prefix_tiles_of(schedule)
    owner = {
        int(start): row
        for row, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist()))
        if end > start
    }
    groups: dict[tuple[int, ...], tuple[set[int], int]] = {}
    ends: Counter[int] = Counter()
    for tile in tiles:
        ends[tile.counter] = max(ends[tile.counter], tile.kv_end)
    for tile in tiles:
        num_tokens = ends[tile.counter]
        rows = {owner[member.token] for member in members_of(tile, schedule)}
        blocks = batch.block_table[min(rows), : num_tokens // SHAPE.block_size].tolist()
        # Those with as many query tokens as each other are a group, also of the same blocks.
        groups.setdefault((tile.rows_len, *blocks), (set(), num_tokens))[0].update(rows)
    return sorted(
        (SharedPrefix(tuple(sorted(rows)), length) for rows, length in groups.values()),
        key=lambda group: group.requests,
    )


@st.composite
def nested_batches(draw: st.DrawFn) -> PagedBatch:
    """Tables that share blocks as in a prefix cache: an id for each path from the root."""
    choices = st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=2, max_size=6)
    paths = draw(st.lists(choices, min_size=4, max_size=8))
    ids: dict[tuple[int, ...], int] = {}
    rows = [
        [ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))]
        for path in paths
    ]
    in_last = st.sampled_from([1, 3, SHAPE.block_size])
    seq_lens = [(len(row) - 1) * SHAPE.block_size + draw(in_last) for row in rows]
    query_lens = [draw(st.sampled_from([0, 1, 1, 1, 1, 3])) for _ in rows]
    table = torch.zeros(len(rows), 6, dtype=torch.int32)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = torch.tensor(blocks)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    return PagedBatch(starts, torch.tensor(seq_lens, dtype=torch.int32), table)


@settings(max_examples=examples(60, few=12))
@given(nested_batches(), st.just(CONFIG) | configs)
def test_groups_are_those_of_the_reference(batch: PagedBatch, config: ArchConfig) -> None:
    schedule = built(batch, config)
    # A member's queries have to fit in one wide tile.
    gate = replace(config.gate, max_member_tokens=schedule.max_member_tokens)
    expected = find_shared_prefixes(batch, SHAPE.block_size, gate, schedule.wide_tokens)
    assert groups_of(schedule, batch) == expected


@pytest.mark.parametrize(("least", "is_shared"), [(64, True), (65, False)])
@pytest.mark.parametrize("max_member_tokens", [1, 2])
def test_gate_at_its_edges(least: int, is_shared: bool, max_member_tokens: int) -> None:
    case = make_case(SHAPE, [Group(64, ((3, 2), (5, 2), (9, 1), (4, 1)))], seed=5)
    config = replace(CONFIG, gate=Gate({2: least}, max_member_tokens))
    members = sum(tile.rows_members for tile in prefix_tiles_of(schedule_of(case, config)))
    assert members == (2 * max_member_tokens if is_shared else 0)


def test_any_number_of_requests_is_laid_out_in_chunks() -> None:
    """Groups, pieces and plain requests on both sides of each chunk's end."""
    config = replace(CONFIG, gate=Gate({2: 1}, 4), split=SplitRule(1, 64))
    spread = [Group(160, ((9, 1), (300, 1), (40, 2))), Group(0, ((500, 1), (7, 40))), Group(64, ())]
    case = make_case(SHAPE, spread * 4, seed=8, num_padding=3)
    whole = schedule_of(case, config)
    assert case.batch.num_requests > 16
    chunks = Schedule(SHAPE, BatchLimits(case.batch.num_requests, case.num_tokens), config, CPU)
    chunks._sizes = chunks._sizes._replace(chunk=16)
    chunks.build(case.batch)
    assert header_of(whole).prefix_tiles > 4
    assert header_of(chunks) == header_of(whole)
    assert tiles_of(chunks) == tiles_of(whole)
    assert chunks.members.tolist() == whole.members.tolist()


def test_worst_batch_fits() -> None:
    """As many partials as there can be: pairs with a prefix, cut wherever it is allowed."""
    config = replace(CONFIG, gate=Gate({2: 1}, 8), split=SplitRule(1, 64))
    case = make_case(SHAPE, [Group(1024, ((700, 8), (900, 8)))] * 4, seed=0)
    schedule = schedule_of(case, config)
    header = header_of(schedule)
    assert 8 * 8 < header.tiles <= schedule.capacity.tiles
    assert header.slots <= schedule.capacity.slots


def test_a_context_has_no_more_pieces_than_the_device_has_programs() -> None:
    """One program merges all of them. Many short contexts aren't cut."""
    lens = torch.tensor([2**20], dtype=torch.int32)
    batch = PagedBatch(torch.tensor([0, 1]).int(), lens, torch.zeros_like(lens)[:, None])
    schedule = built(batch, replace(CONFIG, split=SplitRule(1, 1000)))
    assert header_of(schedule).tiles == 8
    assert schedule.max_programs // SHAPE.num_kv_heads < 8
    case = make_case(SHAPE, [Group(0, ((200, 1),))] * 12, seed=2)
    header = header_of(schedule_of(case, replace(CONFIG, split=SplitRule(64, 1))))
    assert (header.tiles, header.slots) == (12, 0)


def test_requests_that_do_not_fit_a_tile_together_share_nothing() -> None:
    shape = replace(SHAPE, num_q_heads=48, num_kv_heads=1)
    case = make_case(shape, [Group(64, ((1, 1),) * 5)], seed=6)
    schedule = schedule_of(case, CONFIG)
    assert schedule.wide_tokens == 1
    assert header_of(schedule).prefix_tiles == 0


def test_two_schedules_share_their_scratch_memory() -> None:
    shape = replace(SHAPE, head_dim=128)
    first, second = (Schedule(shape, BatchLimits(4, 8), CONFIG, CPU) for _ in range(2))
    assert first.partial_out.data_ptr() == second.partial_out.data_ptr()
    assert first.counters.data_ptr() != second.counters.data_ptr()
    larger = Schedule(shape, BatchLimits(64, 80), CONFIG, CPU)
    assert len(larger.partial_out) > len(first.partial_out)


def test_window_placeholders_in_front_of_equal_blocks() -> None:
    case = make_case(SHAPE, [Group(48, ((3, 1), (5, 1), (9, 1)))], seed=1)
    case.batch.block_table[1, 0] = 0 if case.batch.block_table[1, 0] else 1
    schedule = schedule_of(case, CONFIG)
    tiles = prefix_tiles_of(schedule)
    assert [tile.rows_members for tile in tiles] == [2]
    assert {token for tile in tiles for token, _ in rows_of(tile, schedule)} == {0, 2}


def test_work_beyond_32_bits() -> None:
    """Only lengths matter here, so no cache has to be that large."""
    num_requests, tokens, length = 8, 4096, 2**22
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * tokens
    lens = torch.full((num_requests,), length, dtype=torch.int32)
    table = torch.arange(num_requests, dtype=torch.int32)[:, None].repeat(1, 2)
    schedule = built(PagedBatch(starts, lens, table), CONFIG)
    row_tiles = num_requests * tokens // 16
    target = schedule.capacity.counters - num_requests - 1
    piece = -(-row_tiles * length // target // PIECE_ALIGN) * PIECE_ALIGN
    assert row_tiles * length > 2**31
    header = header_of(schedule)
    assert (header.piece, header.tiles) == (piece, row_tiles * -(-length // piece))


@pytest.mark.parametrize("num_requests", [0, 1])
def test_building_again_replaces_everything(num_requests: int) -> None:
    large = make_case(SHAPE, [Group(64, ((1, 1), (2, 1)))] * 3, seed=3)
    small = make_case(SHAPE, [Group(0, ((5, 1),))] * num_requests, seed=4)
    schedule = Schedule(SHAPE, BatchLimits(8, 16), CONFIG, CPU)
    schedule.build(large.batch)
    address = schedule.tiles.data_ptr()
    schedule.build(small.batch)
    assert header_of(schedule).tiles == num_requests
    assert schedule.tiles.data_ptr() == address
