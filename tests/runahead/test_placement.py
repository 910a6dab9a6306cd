"""Which groups are chained, against what was measured and against brute force."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples
from support.runahead import CPU_CHAIN, CPU_COST, group_loads

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.runahead.placement import MARGIN, Makespans, Placement, choose_placement
from batchllm_operator.runahead.prediction import Chain, ReplicaCost

rules = load("runahead_rules")
GROUP = (4096, 8, 64, 16)


def choose(*groups: tuple[int, int, int, int], chain: Chain = CPU_CHAIN) -> Placement:
    return choose_placement(group_loads(*groups), chain)


def makespans(groups: list[tuple[int, int, int, int]], chain: Chain = CPU_CHAIN) -> Makespans:
    return Makespans(group_loads(*groups), chain, 1024)


@pytest.mark.parametrize(
    ("num_groups", "marked", "whole"),
    [(1, 1, (3.7, 4.0)), (2, 0, (3.8, 5.2)), (3, 1, (7.6, 7.9)), (4, 0, (7.4, 7.8)), (6, 0, None)],
)
def test_the_choice_is_what_measurements_say_pays(
    num_groups: int, marked: int, whole: tuple[float, float] | None
) -> None:
    """12 layers, 4,096 tokens and 8 members a group, two cores."""
    placement = choose(*[GROUP] * num_groups)
    assert len(placement.splits) == marked
    if whole is not None:
        assert 0.92 * whole[0] <= placement.without_s <= 1.08 * whole[1]


def test_a_giant_group_takes_half_and_of_three_groups_one_is_chained() -> None:
    one, three = choose(GROUP), choose(GROUP, GROUP, GROUP)
    members_s = 0.8
    assert 2.1 < one.makespan_s < 2.1 + members_s / 2, "2.1 s were measured with spread members"
    assert one.makespan_s <= 0.75 * one.without_s
    assert three.makespan_s <= 0.95 * three.without_s
    chained_s = makespans([GROUP] * 3).seconds((0, 1, 2))
    assert three.makespan_s < chained_s
    assert 0.9 * 6.5 < chained_s < 7.1, "6.5 to 7.1 s were measured, all three by chains"
    assert list(three.splits.values()) == [CPU_CHAIN.split(4096)]


@pytest.mark.parametrize(
    ("groups", "chained"),
    [
        pytest.param([(512, 8, 64, 16), (8192, 8, 64, 16), (512, 8, 64, 16)], [1], id="giant"),
        pytest.param([(256, 400, 64, 16)], [], id="many members of a short prefix"),
        pytest.param([GROUP, (96, 2, 16, 1)], [0], id="a chain that saves next to nothing"),
        pytest.param([(4096, 1, 8, 4)] * 2, [], id="one group a replica"),
        pytest.param([(40, 4, 20, 4)] * 50 + [(16_000, 4, 64, 16)], [50], id="many small ones"),
    ],
)
def test_chains_are_chosen_where_they_pay(
    groups: list[tuple[int, int, int, int]], chained: list[int]
) -> None:
    placement = choose(*groups)
    assert list(placement.splits) == chained
    assert (placement.makespan_s < placement.without_s) is bool(chained)


@pytest.mark.parametrize(
    "changes", [{"num_replicas": 1}, {"max_chunk_blocks": 32}, {"num_replicas": 200}]
)
def test_where_no_chain_is_possible_none_is_chosen(changes: dict[str, Any]) -> None:
    """One replica; too long for a step each; more replicas than blocks."""
    placement = choose(GROUP, chain=dataclasses.replace(CPU_CHAIN, **changes))
    assert placement.splits == {}
    assert placement.makespan_s == placement.without_s


def test_eight_gpus_with_a_long_prefix_gain_what_the_chain_saves() -> None:
    """A book of 128k tokens for an 8B model: at most T_prefix * (1 - 1 / p)."""
    cost = ReplicaCost.of(MODEL_SHAPES["Llama-3-8B"], find_gpu("H100"))
    chain, book = Chain(cost, 8, 200e9), (131_072, 64, 1, 1)
    placement = choose(book, chain=chain)
    saved_s = placement.without_s - placement.makespan_s
    most_s = cost.step_seconds(131_072) * (1 - 1 / 8)
    assert 0.9 * most_s < saved_s <= 1.01 * most_s
    on_network = dataclasses.replace(chain, link_bytes_per_s=1e9)
    assert choose(book, chain=on_network).makespan_s > 1.5 * placement.makespan_s


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(0, 3))
def test_a_placement_is_no_longer_than_whole_groups_and_near_the_best(
    seed: int, num_replicas: int, link: int
) -> None:
    chain = dataclasses.replace(
        CPU_CHAIN, num_replicas=num_replicas, link_bytes_per_s=10.0 ** (6 + link)
    )
    loads = rules.draw_loads(np.random.default_rng(seed))
    placement, by_set = choose_placement(loads, chain), Makespans(loads, chain, 1024)
    assert placement.without_s == by_set.seconds(())
    assert placement.makespan_s == by_set.seconds(list(placement.splits))
    if placement.splits:
        assert placement.makespan_s <= placement.without_s * (1 - MARGIN)
        lengths = loads.prefix_tokens.astype(int).tolist()
        assert all(sum(split) == lengths[idx] for idx, split in placement.splits.items())
    assert rules.placement_regret(chain, loads) < 0.3  # rarely more than the margin


def test_of_many_equal_groups_the_uneven_rest_is_chained() -> None:
    """14 groups on four replicas: three each, and two that would leave two replicas idle."""
    four = dataclasses.replace(CPU_CHAIN, num_replicas=4)
    assert len(choose(*[GROUP] * 14, chain=four).splits) == 2
    assert choose(*[GROUP] * 16, chain=four).splits == {}


def test_the_longest_groups_are_placed_first_and_prefixes_that_fill_no_step_share_one() -> None:
    chain = dataclasses.replace(CPU_CHAIN, max_chunk_blocks=1 << 40)
    short_s, long_s = (float(CPU_COST.tokens_seconds(np.array(float(num)))) for num in (1024, 2048))
    whole = makespans([(1024, 1, 0, 0), (1024, 1, 0, 0), (2048, 1, 0, 0)], chain)
    assert whole.seconds(()) == pytest.approx(max(2 * short_s, long_s))
    in_steps = dataclasses.replace(CPU_CHAIN, num_replicas=1, max_chunk_blocks=32)
    tokens_s = float(CPU_COST.tokens_seconds(np.array(float(64))))
    together = makespans([(64, 1, 0, 0)] * 16, in_steps)
    assert together.seconds(()) == pytest.approx(16 * tokens_s + CPU_COST.step_overhead_s)


def test_decoding_takes_its_steps_its_tokens_and_reads_the_whole_context() -> None:
    cost = dataclasses.replace(CPU_COST, weights_s=1e-3, read_s_per_token=1e-4)
    alone, prefill_s = Chain(cost, 1, 1e9), float(cost.tokens_seconds(np.array(float(1000))))
    contexts = sum(1000 + num for num in range(1, 6))
    step_s = 12 * 1e-3 + cost.step_overhead_s
    expected = prefill_s + 5 * step_s + 3 * 5 * 12 * cost.s_per_token + 3 * contexts * 12 * 1e-4
    assert makespans([(1000, 3, 0, 5)], alone).seconds(()) == pytest.approx(expected, rel=1e-3)
