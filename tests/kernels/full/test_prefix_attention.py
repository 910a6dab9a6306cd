"""The kernel on more batches, and with any two settings together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.attention_cases import NAN, Group, make_case
from support.attention_checks import (
    AXES,
    DIAGONAL,
    MIXED,
    SHAPE,
    Row,
    assert_close,
    attend,
    check,
    check_row,
    name_of,
    num_prefix_tiles,
    pairwise,
    planner_for,
)

from batchllm_kernels.prefix_attention import AttentionShape, Gate, load_config
from batchllm_kernels.prefix_attention.tiles import HEADER_TILES

SPLIT = [Group(640, ((1, 1), (300, 1), (40, 2))), *MIXED]
"""With a prefix and a context that are cut in pieces."""


@pytest.mark.parametrize("row", pairwise(AXES, DIAGONAL), ids=name_of)
def test_two_settings_together(row: Row) -> None:
    check_row(row)


def test_prefill_of_awkward_lengths() -> None:
    lengths = (1, 3, 4, 5, 15, 16, 17, 63, 65)
    check(
        make_case(
            SHAPE, [Group(0, ((earlier, n),)) for n in lengths for earlier in (0, 33)], seed=1
        )
    )


def test_decode_of_awkward_lengths_and_chunks_at_the_edges_of_steps() -> None:
    """Chunks whose first query ends a step of keys: the steps that all rows see whole end there."""
    decoded = [Group(0, ((num_keys - 1, 1),)) for num_keys in (1, 15, 16, 17, 63, 64, 65)]
    chunks = [Group(0, ((earlier, 20),)) for earlier in (29, 30, 31, 32, 62, 63)]
    check(make_case(SHAPE, decoded + chunks, seed=2))


@pytest.mark.parametrize("num_prefix_tokens", [16, 64, 80])
def test_groups_of_awkward_lengths(num_prefix_tokens: int) -> None:
    groups = [
        Group(num_prefix_tokens, tuple((own, 1) for own in owns))
        for owns in ((0, 0, 17), (1, 15, 16), (63, 63))
    ]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=3))) == 3


def test_members_that_prefill_in_chunks() -> None:
    groups = [Group(128, ((0, 4), (30, 3), (5, 4), (64, 3), (2, 4))), Group(64, ((1, 2), (0, 2)))]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=12))) >= 2


def test_group_larger_than_two_tiles() -> None:
    groups = [Group(96, tuple((own, 1) for own in range(17)))]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=13))) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    groups = []
    for _ in range(rng.randint(1, 4)):
        members = tuple(
            (rng.choice([0, 1, 15, 16, 17, 63, 130]), rng.choice([1, 1, 1, 2, 7, 30]))
            for _ in range(rng.choice([1, 1, 2, 3, 6]))
        )
        groups.append(Group(32 * rng.choice([0, 0, 1, 4, 10]), members))
    heads = rng.choice([(8, 2), (4, 4), (4, 1)])
    shape = AttentionShape(*heads, head_dim=64, block_size=rng.choice([16, 32]))
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    check(make_case(shape, groups, seed=seed, dtype=dtype, num_padding=rng.randint(0, 2)))


def test_merging_waits_for_nobody() -> None:
    """Tiles may finish in any order: the last one merges."""
    case = make_case(SHAPE, SPLIT, seed=14)
    plan = planner_for(case).plan(case.batch)
    assert plan.schedule is not None
    num_tiles = int(plan.schedule.header[HEADER_TILES])
    tiles = plan.schedule.tiles[:num_tiles].clone()
    for seed in range(3):
        order = torch.randperm(num_tiles, generator=torch.Generator().manual_seed(seed))
        plan.schedule.tiles[:num_tiles] = tiles[order]
        assert_close(attend(case, plan), case)


def test_merging_in_a_launch_of_its_own() -> None:
    case = make_case(SHAPE, [*SPLIT, Group(0, ((600, 9),))], seed=0)
    config = replace(load_config("cpu"), merge_in_launch=False)
    assert_close(attend(case, planner_for(case, config=config).plan(case.batch)), case)


def test_partials_of_an_earlier_step_are_never_read() -> None:
    first = make_case(SHAPE, SPLIT, seed=15)
    planner = planner_for(first)
    for case in (first, make_case(SHAPE, MIXED[::-1], seed=16), make_case(SHAPE, [], seed=17)):
        plan = planner.plan(case.batch)
        assert plan.schedule is not None
        plan.schedule.partial_out.fill_(NAN)
        plan.schedule.partial_lse.fill_(NAN)
        if case.num_tokens:
            assert_close(attend(case, plan), case)
        assert not plan.schedule.counters.any()


def test_closed_gate_gives_the_same_without_sharing() -> None:
    case = make_case(SHAPE, MIXED, seed=21)
    config = replace(load_config("cpu"), gate=Gate({2: 10_000}, 64))
    plan = planner_for(case, config=config).plan(case.batch)
    assert num_prefix_tiles(plan) == 0
    assert_close(attend(case, plan), case)
