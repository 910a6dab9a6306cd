"""What the device lays out: the groups of the reference, every key seen once, nothing too large."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import AttentionCase, Group, make_case
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
from batchllm_kernels.prefix_attention import tiles as t
from batchllm_kernels.prefix_attention.config import SplitRule
from batchllm_kernels.prefix_attention.schedule import PIECE_ALIGN, Schedule, Scheduler

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
CONFIG = load_config("cpu")

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


def schedule_of(case: AttentionCase, config: ArchConfig) -> tuple[Schedule, Scheduler]:
    limits = BatchLimits(case.batch.num_requests, case.num_tokens)
    scheduler = Scheduler(case.shape, limits, config, CPU)
    return scheduler.build(case.batch), scheduler


def rows_of(tile: list[int], schedule: Schedule) -> list[tuple[int, int]]:
    """(query token, its position) of a tile's rows, from the members' records."""
    rows = []
    for stacked in range(tile[t.TILE_ROWS_MEMBERS] * tile[t.TILE_ROWS_LEN]):
        member, token = divmod(stacked, tile[t.TILE_ROWS_LEN])
        record = schedule.members[tile[t.TILE_ROWS_FIRST] + member].tolist()
        token += tile[t.TILE_ROW_OFFSET]
        if token < record[t.MEMBER_LEN]:
            rows.append((record[t.MEMBER_TOKEN] + token, record[t.MEMBER_POSITION] + token))
    return rows


@settings(max_examples=examples(25, few=5))
@given(groups, configs, st.integers(0, 3), st.integers(0, 1000))
def test_every_query_sees_each_of_its_keys_once(
    given_groups: list[Group], config: ArchConfig, num_padding: int, seed: int
) -> None:
    case = make_case(SHAPE, given_groups, seed=seed, num_padding=num_padding)
    schedule, scheduler = schedule_of(case, config)
    num_tiles = int(schedule.header[t.HEADER_TILES])
    assert num_tiles <= scheduler.capacity.tiles
    assert schedule.header[t.HEADER_SLOTS] <= scheduler.capacity.slots
    assert schedule.header[t.HEADER_COUNTERS] + case.batch.num_requests <= len(schedule.counters)
    piece = int(schedule.header[t.HEADER_PIECE])
    assert piece % PIECE_ALIGN == 0

    table, starts = case.batch.block_table, case.batch.query_start_loc.tolist()
    owner = {
        token: request
        for request in range(case.batch.num_requests)
        for token in range(starts[request], starts[request + 1])
    }
    seen: Counter[tuple[int, int]] = Counter()
    slots: Counter[int] = Counter()
    partials: dict[int, list[int]] = {}
    firsts: Counter[int] = Counter()
    for tile in schedule.tiles[:num_tiles].tolist():
        start, end = tile[t.TILE_KV_START], tile[t.TILE_KV_END]
        assert end - start <= piece
        rows = rows_of(tile, schedule)
        for token, position in rows:
            row = table[owner[token]]
            for key in range(start, min(end, position + 1)):
                # The tile's own table row leads to the same block.
                block = key // SHAPE.block_size
                assert row[block] == table[tile[t.TILE_BLOCK_ROW], block]
                seen[token, key] += 1
        if tile[t.TILE_SLOT] >= 0:
            num_rows = tile[t.TILE_ROWS_MEMBERS] * tile[t.TILE_ROWS_LEN]
            slots.update(range(tile[t.TILE_SLOT], tile[t.TILE_SLOT] + num_rows))
            firsts[tile[t.TILE_COUNTER]] += bool(tile[t.TILE_FLAGS] & t.IS_FIRST)
            partials.setdefault(tile[t.TILE_COUNTER], []).append(tile[t.TILE_NUM_PARTIALS])
    wanted = {
        (token, key)
        for request in range(case.batch.num_requests)
        for token in range(starts[request], starts[request + 1])
        for key in range(int(case.batch.seq_lens[request]) - (starts[request + 1] - token) + 1)
    }
    assert seen == Counter(wanted)
    assert all(count == 1 for count in slots.values())
    assert all(slot < schedule.header[t.HEADER_SLOTS] for slot in slots)
    assert all(firsts[counter] == 1 for counter in partials)
    assert all(counts == [len(counts)] * len(counts) for counts in partials.values())


def groups_of(schedule: Schedule, batch: PagedBatch) -> list[SharedPrefix]:
    """The groups that the device found, read off its prefix tiles."""
    tiles = schedule.tiles[: int(schedule.header[t.HEADER_PREFIX_TILES])].tolist()
    owner = {
        int(start): row
        for row, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist()))
        if end > start
    }
    found: dict[tuple[int, ...], tuple[set[int], int]] = {}
    ends: Counter[int] = Counter()
    for tile in tiles:
        ends[tile[t.TILE_COUNTER]] = max(ends[tile[t.TILE_COUNTER]], tile[t.TILE_KV_END])
    for tile in tiles:
        num_tokens = ends[tile[t.TILE_COUNTER]]
        records = schedule.members[tile[t.TILE_ROWS_FIRST] :][: tile[t.TILE_ROWS_MEMBERS]]
        rows = {owner[int(record[t.MEMBER_TOKEN])] for record in records}
        blocks = batch.block_table[min(rows), : num_tokens // SHAPE.block_size].tolist()
        # Those with as many query tokens as each other are a group, also of the same blocks.
        key = (tile[t.TILE_ROWS_LEN], *blocks)
        found.setdefault(key, (set(), num_tokens))[0].update(rows)
    return sorted(
        (SharedPrefix(tuple(sorted(rows)), length) for rows, length in found.values()),
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
    limits = BatchLimits(batch.num_requests, int(batch.query_start_loc[-1]))
    scheduler = Scheduler(SHAPE, limits, config, CPU)
    found = groups_of(scheduler.build(batch), batch)
    # A member's queries have to fit in one wide tile.
    gate = replace(config.gate, max_member_tokens=scheduler.max_member_tokens)
    tile_tokens = scheduler.wide_tokens
    assert found == find_shared_prefixes(batch, SHAPE.block_size, gate, tile_tokens)


def test_two_blocks_of_five_save_more_than_three_of_two() -> None:
    """2 * (1 - 1/5) against 3 * (1 - 1/2)."""
    table = torch.tensor([[1, 2, third, 10 + third] for third in (3, 3, 4, 5, 6)]).int()
    batch = PagedBatch(torch.arange(6).int(), torch.full((5,), 49).int(), table)
    scheduler = Scheduler(SHAPE, BatchLimits(5, 5), CONFIG, CPU)
    assert groups_of(scheduler.build(batch), batch) == [SharedPrefix((0, 1, 2, 3, 4), 32)]


@pytest.mark.parametrize(("least", "is_shared"), [(64, True), (65, False)])
@pytest.mark.parametrize("max_member_tokens", [1, 2])
def test_gate_at_its_edges(least: int, is_shared: bool, max_member_tokens: int) -> None:
    case = make_case(SHAPE, [Group(64, ((3, 2), (5, 2), (9, 1), (4, 1)))], seed=5)
    config = replace(CONFIG, gate=Gate({2: least}, max_member_tokens))
    schedule, _ = schedule_of(case, config)
    tiles = schedule.tiles[: int(schedule.header[t.HEADER_PREFIX_TILES])].tolist()
    members = sum(tile[t.TILE_ROWS_MEMBERS] for tile in tiles)
    assert members == (2 * max_member_tokens if is_shared else 0)


def test_any_number_of_requests_is_laid_out_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, pieces and plain requests on both sides of each chunk's end."""
    config = replace(CONFIG, gate=Gate({2: 1}, 4), split=SplitRule(1, 64))
    spread = [Group(160, ((9, 1), (300, 1), (40, 2))), Group(0, ((500, 1), (7, 40))), Group(64, ())]
    case = make_case(SHAPE, spread * 4, seed=8, num_padding=3)
    whole, _ = schedule_of(case, config)
    monkeypatch.setattr("batchllm_kernels.prefix_attention.schedule.CHUNK", 16)
    assert case.batch.num_requests > 16
    chunks, _ = schedule_of(case, config)
    num_tiles = int(whole.header[t.HEADER_TILES])
    assert whole.header[t.HEADER_PREFIX_TILES] > 4
    assert chunks.header.tolist() == whole.header.tolist()
    assert chunks.tiles[:num_tiles].tolist() == whole.tiles[:num_tiles].tolist()
    assert chunks.members.tolist() == whole.members.tolist()


def test_worst_batch_fits() -> None:
    """As many partials as there can be: pairs with a prefix, cut wherever it is allowed."""
    config = replace(CONFIG, gate=Gate({2: 1}, 8), split=SplitRule(1, 64))
    case = make_case(SHAPE, [Group(1024, ((700, 8), (900, 8)))] * 4, seed=0)
    schedule, scheduler = schedule_of(case, config)
    assert schedule.header[t.HEADER_TILES] > 8 * 8
    assert schedule.header[t.HEADER_TILES] <= scheduler.capacity.tiles
    assert schedule.header[t.HEADER_SLOTS] <= scheduler.capacity.slots


def test_a_context_has_no_more_pieces_than_the_device_has_programs() -> None:
    """One program merges all of them."""
    lens = torch.tensor([2**20], dtype=torch.int32)
    batch = PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32), lens, torch.zeros_like(lens)[:, None]
    )
    config = replace(CONFIG, split=SplitRule(1, 1000))
    scheduler = Scheduler(SHAPE, BatchLimits(1, 1), config, CPU)
    assert scheduler.build(batch).header[t.HEADER_TILES] == 8
    assert scheduler.max_programs // SHAPE.num_kv_heads < 8


def test_requests_that_do_not_fit_a_tile_together_share_nothing() -> None:
    shape = replace(SHAPE, num_q_heads=48, num_kv_heads=1)
    case = make_case(shape, [Group(64, ((1, 1),) * 5)], seed=6)
    schedule, scheduler = schedule_of(case, CONFIG)
    assert scheduler.wide_tokens == 1
    assert schedule.header[t.HEADER_PREFIX_TILES] == 0


def test_two_schedulers_share_their_scratch_memory() -> None:
    shape = replace(SHAPE, head_dim=128)
    first, second = (Scheduler(shape, BatchLimits(4, 8), CONFIG, CPU) for _ in range(2))
    batch = make_case(shape, [Group(0, ((5, 1),))], seed=7).batch
    built, other = first.build(batch), second.build(batch)
    assert built.partial_out.data_ptr() == other.partial_out.data_ptr()
    assert built.counters.data_ptr() != other.counters.data_ptr()
    larger = Scheduler(shape, BatchLimits(64, 80), CONFIG, CPU).build(batch)
    assert len(larger.partial_out) > len(built.partial_out)
    assert first.build(batch).partial_out.data_ptr() == built.partial_out.data_ptr()


def test_window_placeholders_in_front_of_equal_blocks() -> None:
    case = make_case(SHAPE, [Group(48, ((3, 1), (5, 1), (9, 1)))], seed=1)
    case.batch.block_table[1, 0] = 0 if case.batch.block_table[1, 0] else 1
    schedule, _ = schedule_of(case, CONFIG)
    tiles = schedule.tiles[: int(schedule.header[t.HEADER_PREFIX_TILES])].tolist()
    assert [tile[t.TILE_ROWS_MEMBERS] for tile in tiles] == [2]
    assert {token for tile in tiles for token, _ in rows_of(tile, schedule)} == {0, 2}


def test_many_short_requests_are_not_cut() -> None:
    case = make_case(SHAPE, [Group(0, ((200, 1),))] * 12, seed=2)
    schedule, _ = schedule_of(case, replace(CONFIG, split=SplitRule(64, 1)))
    assert schedule.header[t.HEADER_TILES] == 12
    assert schedule.header[t.HEADER_SLOTS] == 0


def test_work_beyond_32_bits() -> None:
    """Only lengths matter here, so no cache has to be that large."""
    num_requests, tokens, length = 8, 4096, 2**22
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * tokens
    lens = torch.full((num_requests,), length, dtype=torch.int32)
    table = torch.arange(num_requests, dtype=torch.int32)[:, None].repeat(1, 2)
    limits = BatchLimits(num_requests, num_requests * tokens)
    scheduler = Scheduler(SHAPE, limits, CONFIG, CPU)
    schedule = scheduler.build(PagedBatch(starts, lens, table))
    row_tiles = num_requests * tokens // 16
    target = scheduler.capacity.counters - num_requests - 1
    piece = -(-row_tiles * length // target // PIECE_ALIGN) * PIECE_ALIGN
    assert row_tiles * length > 2**31
    assert schedule.header[t.HEADER_PIECE] == piece
    assert schedule.header[t.HEADER_TILES] == row_tiles * -(-length // piece)


@pytest.mark.parametrize("num_requests", [0, 1])
def test_building_again_replaces_everything(num_requests: int) -> None:
    large = make_case(SHAPE, [Group(64, ((1, 1), (2, 1)))] * 3, seed=3)
    small = make_case(SHAPE, [Group(0, ((5, 1),))] * num_requests, seed=4)
    scheduler = Scheduler(SHAPE, BatchLimits(8, 16), CONFIG, CPU)
    before = scheduler.build(large.batch)
    after = scheduler.build(small.batch)
    assert after.header[t.HEADER_TILES] == num_requests
    assert after.tiles.data_ptr() == before.tiles.data_ptr()
