"""Which groups are spread and chained, against what was measured and against brute force."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples
from support.runahead import COST, CPU_CHAIN, CPU_COST, group_loads

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.runahead.placement import (
    MARGIN,
    GroupLoads,
    Makespans,
    Placement,
    choose_placement,
)
from batchllm_operator.runahead.prediction import Chain, ReplicaCost
from batchllm_operator.runahead.split import split_prefixes

rules = load("runahead_rules")
GROUP = (4096, 8, 64, 16)


def choose(
    *groups: tuple[int, int, int, int], chain: Chain = CPU_CHAIN, **changes: Any
) -> Placement:
    return choose_placement(group_loads(*groups), chain, **changes)


def makespan(
    groups: list[tuple[int, int, int, int]],
    chain: Chain = CPU_CHAIN,
    spread: tuple[int, ...] = (),
    *,
    chained: bool = False,
    max_num_seqs: int = 1024,
) -> float:
    lengths = split_prefixes(chain, [groups[idx][0] for idx in spread] if chained else [])
    splits = {idx: lengths[groups[idx][0]] for idx in spread} if chained else {}
    makespans = Makespans(group_loads(*groups), chain, max_num_seqs, splits)
    return makespans.seconds(spread, chained=chained)


# What was measured: 12 layers, 4,096 tokens and 8 members a group, two cores


@pytest.mark.parametrize(
    ("num_groups", "marked", "whole", "recompute"),
    [
        (1, 1, (3.7, 4.0), (3.4, 3.9)),
        (2, 0, (3.8, 5.2), (7.0, 9.0)),
        (3, 1, (7.6, 7.9), (10.8, 11.7)),
        (4, 0, (7.4, 7.8), (14.0, 19.0)),
        (5, 1, None, None),
        (6, 0, None, None),
    ],
)
def test_the_choice_is_what_measurements_say_pays(
    num_groups: int,
    marked: int,
    whole: tuple[float, float] | None,
    recompute: tuple[float, float] | None,
) -> None:
    groups = [GROUP] * num_groups
    assert len(choose(*groups).splits) == marked
    for spread, measured in (((), whole), (tuple(range(num_groups)), recompute)):
        if measured is not None:
            assert 0.92 * measured[0] <= makespan(groups, spread=spread) <= 1.08 * measured[1]


def test_a_giant_group_takes_half_and_of_three_groups_one_is_chained() -> None:
    one, three = choose(GROUP), choose(GROUP, GROUP, GROUP)
    assert one.makespan_s == pytest.approx(2.1, abs=0.1), "2.05 to 2.19 s were measured"
    assert one.makespan_s <= 0.75 * one.without_s
    assert three.makespan_s <= 0.95 * three.without_s
    chained_s = makespan([GROUP] * 3, spread=(0, 1, 2), chained=True)
    assert three.makespan_s < chained_s
    assert 0.9 * 6.5 < chained_s < 7.1, "6.5 to 7.1 s were measured, all three by chains"
    assert list(three.splits.values()) == [split_prefixes(CPU_CHAIN, [4096])[4096]]


@pytest.mark.parametrize(
    ("groups", "chained", "recomputed"),
    [
        pytest.param([(512, 8, 64, 16), (8192, 8, 64, 16), (512, 8, 64, 16)], [1], (), id="giant"),
        pytest.param([(256, 400, 64, 16)], [], (0,), id="many members of a short prefix"),
        pytest.param([GROUP, (96, 2, 16, 1)], [0], (), id="a chain that saves next to nothing"),
        pytest.param([(4096, 1, 8, 4)] * 2, [], (), id="one group a replica"),
    ],
)
def test_chains_and_recomputation_are_chosen_where_they_pay(
    groups: list[tuple[int, int, int, int]], chained: list[int], recomputed: tuple[int, ...]
) -> None:
    placement = choose(*groups)
    assert list(placement.splits) == chained
    if not chained:
        assert placement.recompute_idxs == recomputed
        assert placement.makespan_s == placement.without_s


def test_slow_links_are_not_worth_it() -> None:
    """KV of 49 kB a token, as on the CPU: 100 MB for half the prefix."""
    for bytes_per_s, is_chained in ((1e9, True), (1e8, True), (2e6, False)):
        chain = dataclasses.replace(CPU_CHAIN, link_bytes_per_s=bytes_per_s)
        assert bool(choose(GROUP, chain=chain).splits) is is_chained


@pytest.mark.parametrize(
    ("changes", "can_chain"),
    [
        ({"num_replicas": 1}, True),
        ({}, False),
        ({"max_chunk_blocks": 32}, True),
        ({"num_replicas": 200}, True),
    ],
)
def test_where_no_chain_is_possible_none_is_chosen(
    changes: dict[str, Any], can_chain: bool
) -> None:
    """One replica; not wanted; too long for a step each; more replicas than blocks."""
    chain = dataclasses.replace(CPU_CHAIN, **changes)
    placement = choose(GROUP, chain=chain, can_chain=can_chain)
    assert placement.splits == {}
    assert placement.makespan_s == placement.without_s


def test_eight_gpus_with_a_long_prefix_gain_what_the_chain_saves() -> None:
    """A book of 128k tokens for an 8B model: at most T_prefix * (1 - 1 / p)."""
    cost = ReplicaCost.of(MODEL_SHAPES["Llama-3-8B"], find_gpu("H100"))
    chain, book = Chain(cost, 8, 200e9, 2e-5), (131_072, 64, 200, 100)
    placement = choose(book, chain=chain)
    saved_s = makespan([book], chain, (0,)) - placement.makespan_s
    most_s = cost.step_seconds(131_072) * (1 - 1 / 8)
    assert 0.9 * most_s < saved_s <= most_s
    on_network = dataclasses.replace(chain, link_bytes_per_s=1e9, latency_s=1e-4)
    assert choose(book, chain=on_network).makespan_s > 1.5 * placement.makespan_s


# Against brute force


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(0, 3))
def test_a_placement_is_no_longer_than_either_way_for_all_groups(
    seed: int, num_replicas: int, link: int
) -> None:
    chain = dataclasses.replace(
        CPU_CHAIN, num_replicas=num_replicas, link_bytes_per_s=10.0 ** (6 + link)
    )
    loads: GroupLoads = rules.draw_loads(np.random.default_rng(seed))
    placement = choose_placement(loads, chain)
    lengths = loads.prefix_tokens.astype(int).tolist()
    makespans = Makespans(loads, chain, 1024, placement.splits)
    whole_s = makespans.seconds(())
    assert placement.makespan_s <= placement.without_s <= whole_s
    assert (placement.without_s == whole_s) is (not placement.recompute_idxs)
    recomputed_s = makespans.seconds(placement.recompute_idxs, chained=False)
    assert placement.without_s == pytest.approx(recomputed_s)
    if placement.splits:
        assert placement.makespan_s <= placement.without_s * (1 - MARGIN)
        assert placement.makespan_s == pytest.approx(makespans.seconds(list(placement.splits)))
        assert all(sum(split) == lengths[idx] for idx, split in placement.splits.items())
    assert rules.placement_regret(chain, loads) < 0.3  # rarely more than the margin


def test_without_a_chain_one_group_may_be_recomputed_and_the_others_whole() -> None:
    """Many members of a short prefix beside long ones: neither way for all is near the best."""
    groups = [(4096, 1, 64, 16), (256, 400, 64, 16), (4096, 1, 64, 16)]
    placement = choose(*groups, can_chain=False)
    assert placement.recompute_idxs == (1,)
    assert placement.makespan_s < 0.9 * min(makespan(groups), makespan(groups, spread=(0, 1, 2)))


def test_of_many_equal_groups_the_uneven_rest_is_chained() -> None:
    """14 groups on four replicas: three each, and two that would leave two replicas idle."""
    four = dataclasses.replace(CPU_CHAIN, num_replicas=4)
    assert len(choose(*[GROUP] * 14, chain=four).splits) == 2
    assert choose(*[GROUP] * 16, chain=four).splits == {}


def test_hundreds_of_small_groups_hide_no_giant_one() -> None:
    small = [(64 + idx % 64, 4, 20, 4) for idx in range(500)]
    four = dataclasses.replace(CPU_CHAIN, num_replicas=4, max_chunk_blocks=1 << 20)
    placement = choose(*small, (40_000, 4, 64, 16), chain=four)
    assert list(placement.splits) == [500]
    assert placement.makespan_s < 0.6 * placement.without_s


def test_the_longest_groups_are_placed_first() -> None:
    chain = dataclasses.replace(CPU_CHAIN, max_chunk_blocks=1 << 40)  # a prefix is a part of a step
    whole_s = makespan([(1024, 1, 0, 0), (1024, 1, 0, 0), (2048, 1, 0, 0)], chain)
    short_s, long_s = (float(CPU_COST.tokens_seconds(np.array(float(num)))) for num in (1024, 2048))
    assert whole_s == pytest.approx(max(2 * short_s, long_s))


def test_prefixes_that_fill_no_step_share_one() -> None:
    alone = dataclasses.replace(CPU_CHAIN, num_replicas=1, max_chunk_blocks=32)
    tokens_s = float(CPU_COST.tokens_seconds(np.array(float(64))))
    step_s = CPU_COST.step_overhead_s + CPU_COST.sampled_token_s
    assert makespan([(64, 1, 0, 0)] * 16, alone) == pytest.approx(16 * tokens_s + step_s)


def test_replicas_without_a_member_recompute_nothing() -> None:
    """Three groups of one member on three replicas: one prefix each, in either way."""
    three, groups = dataclasses.replace(CPU_CHAIN, num_replicas=3), [(4096, 1, 8, 4)] * 3
    assert makespan(groups, three, (0, 1, 2)) == pytest.approx(makespan(groups, three))


# Decoding


def test_decoding_together_reads_the_weights_once_and_the_whole_context() -> None:
    """Ten whole groups on one replica: as many steps as the longest output, not ten times."""
    alone = Chain(dataclasses.replace(COST, weights_s=1e-3), 1, 1e9)
    prefill_s, group = float(COST.tokens_seconds(np.array(float(16)))), (16, 1, 0, 100)
    assert makespan([group], alone) == pytest.approx(prefill_s + 100 * 4 * 1e-3)
    assert makespan([group] * 10, alone) == pytest.approx(10 * prefill_s + 100 * 4 * 1e-3)
    in_pairs = makespan([group] * 10, alone, max_num_seqs=2)
    assert in_pairs == pytest.approx(10 * prefill_s + 500 * 4 * 1e-3)
    read = dataclasses.replace(alone, cost=dataclasses.replace(alone.cost, read_s_per_token=1e-3))
    contexts = sum(110 + num for num in range(1, 6))
    more_s = makespan([(100, 3, 10, 5)], read) - makespan([(100, 3, 10, 5)], alone)
    assert more_s == pytest.approx(3 * contexts * 4 * 1e-3)
