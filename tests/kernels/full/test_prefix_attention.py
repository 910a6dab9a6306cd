"""The kernel on more batches, and with any two settings together."""

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
    header_of,
    name_of,
    num_prefix_tiles,
    pairwise,
    planner_for,
    schedule_of,
)

from batchllm_kernels.prefix_attention import AttentionShape, Gate, load_config

SPLIT = [Group(640, ((1, 1), (300, 1), (40, 2))), *MIXED]
"""With a prefix and a context that are cut in pieces."""


@pytest.mark.parametrize("row", pairwise(AXES, DIAGONAL), ids=name_of)
def test_two_settings_together(row: Row) -> None:
    check_row(row)


def test_members_that_prefill_in_chunks_and_a_group_larger_than_two_tiles() -> None:
    groups = [Group(128, ((0, 4), (30, 3), (5, 4), (64, 3), (2, 4))), Group(64, ((1, 2), (0, 2)))]
    assert num_prefix_tiles(check(make_case(SHAPE, groups, seed=12))) >= 2
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
    schedule = schedule_of(plan)
    num_tiles = header_of(schedule).tiles
    tiles = schedule.tiles[:num_tiles].clone()
    for seed in range(3):
        order = torch.randperm(num_tiles, generator=torch.Generator().manual_seed(seed))
        schedule.tiles[:num_tiles] = tiles[order]
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
        schedule = schedule_of(plan)
        schedule.partial_out.fill_(NAN)
        schedule.partial_lse.fill_(NAN)
        if case.num_tokens:
            assert_close(attend(case, plan), case)
        assert not schedule.counters.any()


def test_closed_gate_gives_the_same_without_sharing() -> None:
    case = make_case(SHAPE, MIXED, seed=21)
    config = replace(load_config("cpu"), gate=Gate({2: 10_000}, 64))
    plan = planner_for(case, config=config).plan(case.batch)
    assert num_prefix_tiles(plan) == 0
    assert_close(attend(case, plan), case)
