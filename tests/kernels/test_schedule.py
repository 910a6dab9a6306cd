"""What the device lays out: the groups of the reference, every key seen once, nothing too large."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import AttentionCase, Group, make_case

from batchllm_kernels.prefix_attention import (
    ArchConfig,
    AttentionShape,
    BatchLimits,
    Gate,
    PagedBatch,
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
        st.lists(members, min_size=1, max_size=6).map(tuple),
    ),
    max_size=5,
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


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(groups, configs, st.integers(0, 1000))
def test_groups_are_those_of_the_reference(
    given_groups: list[Group], config: ArchConfig, seed: int
) -> None:
    case = make_case(SHAPE, given_groups, seed=seed)
    schedule, scheduler = schedule_of(case, config)
    tiles = schedule.tiles[: int(schedule.header[t.HEADER_PREFIX_TILES])].tolist()
    owner = {int(start): row for row, start in enumerate(case.batch.query_start_loc[:-1])}
    found: dict[int, tuple[set[int], int]] = {}
    for tile in tiles:
        requests = {
            owner[int(schedule.members[tile[t.TILE_ROWS_FIRST] + idx][t.MEMBER_TOKEN])]
            for idx in range(tile[t.TILE_ROWS_MEMBERS])
        }
        first_block = int(case.batch.block_table[min(requests), 0])
        members, length = found.get(first_block, (set(), 0))
        found[first_block] = members | requests, max(length, tile[t.TILE_KV_END])
    # A member's queries have to fit in one wide tile.
    gate = replace(config.gate, max_member_tokens=scheduler.max_member_tokens)
    wanted = find_shared_prefixes(case.batch, SHAPE.block_size, gate)
    assert sorted((sorted(members), length) for members, length in found.values()) == sorted(
        (list(prefix.requests), prefix.num_tokens) for prefix in wanted
    )


def test_worst_batch_fits() -> None:
    """As many partials as there can be: pairs with a prefix, cut wherever it is allowed."""
    config = replace(CONFIG, gate=Gate({2: 1}, 8), split=SplitRule(1, 64))
    case = make_case(SHAPE, [Group(1024, ((700, 8), (900, 8)))] * 4, seed=0)
    schedule, scheduler = schedule_of(case, config)
    assert schedule.header[t.HEADER_TILES] > 8 * 8
    assert schedule.header[t.HEADER_TILES] <= scheduler.capacity.tiles
    assert schedule.header[t.HEADER_SLOTS] <= scheduler.capacity.slots


def test_window_placeholders_in_front_of_equal_blocks() -> None:
    case = make_case(SHAPE, [Group(48, ((3, 1), (5, 1), (9, 1)))], seed=1)
    case.batch.block_table[1, 0] = 0 if case.batch.block_table[1, 0] else 1
    schedule, _ = schedule_of(case, CONFIG)
    tiles = schedule.tiles[: int(schedule.header[t.HEADER_PREFIX_TILES])].tolist()
    assert [tile[t.TILE_ROWS_MEMBERS] for tile in tiles] == [2]
    assert {token for tile in tiles for token, _ in rows_of(tile, schedule)} == {0, 2}


def test_many_short_requests_are_not_cut() -> None:
    case = make_case(SHAPE, [Group(0, ((200, 1),))] * 24, seed=2)
    schedule, _ = schedule_of(case, replace(CONFIG, split=SplitRule(64, 1)))
    assert schedule.header[t.HEADER_TILES] == 24
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
