"""Which groups are marked for runahead, against what was measured and against brute force."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.runahead import COST, CPU_COST

from batchllm_operator.cost import MODEL_SHAPES, find_gpu
from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning import (
    Chain,
    GroupLoad,
    Link,
    Makespans,
    Placement,
    PlacementSettings,
    ReplicaCost,
    choose_placement,
    search_split,
)

CPU_CHAIN = Chain(CPU_COST, Link(1e9, 1e-4), 32, 8192)
GROUP = GroupLoad(4096, 8, 64, 16)
TWO = PlacementSettings(2)


def choose(
    groups: Sequence[GroupLoad], chain: Chain = CPU_CHAIN, settings: PlacementSettings = TWO
) -> Placement:
    return choose_placement(groups, chain, settings)


def all_chained(
    groups: Sequence[GroupLoad], chain: Chain = CPU_CHAIN, settings: PlacementSettings = TWO
) -> float | None:
    """Makespan with all prefixes computed by chains; None if one can't be."""
    makespans = Makespans(groups, chain, settings)
    everyone = range(len(groups))
    return makespans.makespan(everyone) if len(makespans.splits) == len(groups) else None


def gain(found: Placement) -> float:
    """Share of the best makespan without chains that the choice saves."""
    return 1 - found.makespan_s / found.without_s


# What was measured: 12 layers, 4,096 tokens and 8 members a group, two cores


@pytest.mark.parametrize(
    ("num_groups", "marked", "whole_group", "recompute"),
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
    whole_group: tuple[float, float] | None,
    recompute: tuple[float, float] | None,
) -> None:
    found = choose([GROUP] * num_groups)
    assert len(found.runahead_idxs) == marked
    assert found.policy == ("runahead" if marked else "whole_group")
    for seconds, measured in ((found.whole_group_s, whole_group), (found.recompute_s, recompute)):
        if measured is not None:
            assert 0.92 * measured[0] <= seconds <= 1.08 * measured[1]


def test_one_giant_group_takes_half_and_three_groups_need_not_wait_for_the_third() -> None:
    one, three = choose([GROUP]), choose([GROUP] * 3)
    for found, most in ((one, 0.75), (three, 0.95)):
        assert found.makespan_s <= most * min(found.whole_group_s, found.recompute_s)
    assert one.makespan_s == pytest.approx(2.1, abs=0.1), "2.05 to 2.19 s were measured"
    chained_s = all_chained([GROUP] * 3)
    assert chained_s is not None
    assert 0.9 * 6.5 < chained_s < 7.1, "6.5 to 7.1 s were measured, all three by chains"
    assert three.makespan_s < chained_s
    assert three.splits == (search_split(CPU_CHAIN, 4096, 2, "whole_prefix"),)


def test_the_giant_group_is_chained_and_the_small_ones_are_whole() -> None:
    """On one replica it would take 9 s; recomputed by both, hardly less."""
    giant = GroupLoad(8192, 8, 64, 16)
    small = GroupLoad(512, 8, 64, 16)
    found = choose([small, giant, small])
    assert found.runahead_idxs == (1,)
    assert found.makespan_s < 0.75 * min(found.whole_group_s, found.recompute_s)


def test_many_members_are_worth_recomputing_a_short_prefix() -> None:
    found = choose([GroupLoad(256, 400, 64, 16)])
    assert found.recompute_s < 0.6 * found.whole_group_s
    assert found.policy == "recompute", "a chain of so few tokens gains less than the margin"
    assert found.runahead_idxs == ()
    assert found.makespan_s == found.recompute_s
    assert gain(found) == 0


def test_the_margin_decides_how_much_has_to_be_gained() -> None:
    saved = gain(choose([GROUP]))
    assert saved == pytest.approx(0.43, abs=0.02)
    assert choose([GROUP], settings=PlacementSettings(2, margin=saved + 0.01)).policy == "recompute"
    assert choose([GROUP], settings=PlacementSettings(2, margin=saved - 0.01)).policy == "runahead"


def test_slow_hops_are_not_worth_it() -> None:
    """KV of 49 kB a token, as on the CPU: 100 MB for half the prefix."""
    for bytes_per_s, policy_name in ((1e9, "runahead"), (1e8, "runahead"), (2e6, "recompute")):
        chain = dataclasses.replace(CPU_CHAIN, link=Link(bytes_per_s))
        assert choose([GROUP], chain).policy == policy_name


@pytest.mark.parametrize(
    ("settings", "chain"),
    [
        (PlacementSettings(1), CPU_CHAIN),
        (PlacementSettings(2, min_prefix_tokens=4097), CPU_CHAIN),
        (TWO, dataclasses.replace(CPU_CHAIN, max_step_tokens=1024)),
        (PlacementSettings(200), CPU_CHAIN),
    ],
)
def test_where_no_chain_is_possible_none_is_chosen(
    settings: PlacementSettings, chain: Chain
) -> None:
    """One replica; too short a prefix, or too long for a step each; more replicas than blocks."""
    found = choose([GROUP], chain, settings)
    assert found.policy != "runahead"
    assert all_chained([GROUP], chain, settings) is None
    assert (found.runahead_idxs, found.splits, gain(found)) == ((), (), 0)


def test_eight_gpus_with_a_long_prefix_gain_what_the_chain_saves() -> None:
    """A book of 128k tokens for an 8B model: at most T_prefix * (1 - 1 / p)."""
    cost = ReplicaCost.of(MODEL_SHAPES["Llama-3-8B"], find_gpu("H100"))
    chain = Chain(cost, Link(200e9, 2e-5), 16)
    book = GroupLoad(131_072, 64, 200, 100)
    found = choose_placement([book], chain, PlacementSettings(8))
    saved_s = found.recompute_s - found.makespan_s
    assert found.policy == "runahead"
    most_s = cost.prefill_seconds(131_072) * (1 - 1 / 8)
    assert 0.9 * most_s < saved_s <= most_s
    on_network = dataclasses.replace(chain, link=Link(1e9, 1e-4))
    slower = choose_placement([book], on_network, PlacementSettings(8))
    assert slower.makespan_s > 1.5 * found.makespan_s


# Against brute force


group_loads = st.builds(
    GroupLoad,
    st.sampled_from([64, 500, 1024, 4096, 6000]),
    st.sampled_from([1, 3, 8, 40]),
    st.sampled_from([0, 10, 200]),
    st.sampled_from([0, 1, 30]),
)


@settings(max_examples=examples(60))
@given(st.lists(group_loads, min_size=1, max_size=5), st.integers(2, 3), st.integers(0, 3))
def test_no_set_of_groups_is_better_than_the_chosen_one(
    groups: list[GroupLoad], num_replicas: int, link: int
) -> None:
    chain = dataclasses.replace(CPU_CHAIN, link=Link(10.0 ** (6 + link)))
    options = PlacementSettings(num_replicas, margin=0.0, slack=0.0)
    found = choose(groups, chain, options)
    makespans = Makespans(groups, chain, options)
    everyone = range(len(groups))
    sets = [
        [idx for idx, taken in zip(everyone, chosen, strict=True) if taken]
        for chosen in product((False, True), repeat=len(groups))
    ]
    chainable = [each for each in sets if all(idx in makespans.splits for idx in each)]
    best = min(makespans.makespan(each) for each in chainable)
    without = min(makespans.makespan(each, chained=False) for each in sets)
    assert found.whole_group_s == makespans.makespan(())
    if found.runahead_idxs:
        assert found.makespan_s == pytest.approx(best)
        assert gain(found) == pytest.approx(1 - best / without)
        assert best < without <= min(found.whole_group_s, found.recompute_s)
        for idx, split in zip(found.runahead_idxs, found.splits, strict=True):
            chain.check_split(split, groups[idx].prefix_tokens)
    else:
        assert best >= without * (1 - 1e-12)
        assert found.makespan_s == pytest.approx(without)
        assert makespans.makespan(found.recompute_idxs, chained=False) == pytest.approx(without)
        assert found.policy == ("recompute" if found.recompute_idxs else "whole_group")


@settings(max_examples=examples(60))
@given(st.lists(group_loads, min_size=1, max_size=6), st.integers(2, 4), st.integers(0, 3))
def test_no_policy_for_all_groups_is_better_by_more_than_the_margin(
    groups: list[GroupLoad], num_replicas: int, link: int
) -> None:
    chain = dataclasses.replace(CPU_CHAIN, link=Link(10.0 ** (6 + link)))
    settings = PlacementSettings(num_replicas)
    found, chained_s = choose(groups, chain, settings), all_chained(groups, chain, settings)
    policies = [found.whole_group_s, found.recompute_s]
    policies += [] if chained_s is None else [chained_s]
    assert found.makespan_s <= min(policies) / (1 - 0.05) * (1 + 1e-9)


def test_without_a_chain_one_group_may_be_recomputed_and_the_others_whole() -> None:
    """Many members of a short prefix beside long ones: neither policy for all is near the best."""
    chain = dataclasses.replace(CPU_CHAIN, max_step_tokens=32)  # no chunk fits
    groups = [GroupLoad(4096, 1, 64, 16), GroupLoad(256, 400, 64, 16), GroupLoad(4096, 1, 64, 16)]
    found = choose(groups, chain)
    assert (found.policy, found.recompute_idxs, found.runahead_idxs) == ("recompute", (1,), ())
    assert found.makespan_s < 0.9 * min(found.whole_group_s, found.recompute_s)
    assert choose([GROUP] * 2, chain).recompute_idxs == ()


@settings(max_examples=examples(60))
@given(st.lists(group_loads, min_size=1, max_size=6), st.integers(2, 3))
def test_fewer_chains_are_taken_where_the_makespan_hardly_grows(
    groups: list[GroupLoad], num_replicas: int
) -> None:
    exact = choose(groups, settings=PlacementSettings(num_replicas, margin=0.0, slack=0.0))
    found = choose(groups, settings=PlacementSettings(num_replicas, margin=0.0, slack=0.2))
    assert set(found.runahead_idxs) <= set(exact.runahead_idxs)
    assert found.makespan_s <= exact.makespan_s * 1.2 * (1 + 1e-9)


def test_a_chain_that_saves_next_to_nothing_is_left_out() -> None:
    groups = [GROUP, GroupLoad(96, 2, 16, 1)]
    assert choose(groups, settings=PlacementSettings(2, slack=0.0)).runahead_idxs == (0, 1)
    assert choose(groups).runahead_idxs == (0,)


@given(st.lists(group_loads, min_size=11, max_size=16), st.integers(2, 4))
@settings(max_examples=15)
def test_of_more_groups_the_choice_is_at_least_as_good_as_each_policy(
    groups: list[GroupLoad], num_replicas: int
) -> None:
    settings = PlacementSettings(num_replicas, margin=0.0)
    found, chained_s = choose(groups, settings=settings), all_chained(groups, settings=settings)
    assert found.makespan_s <= min(found.whole_group_s, found.recompute_s)
    if chained_s is not None:
        without = min(found.whole_group_s, found.recompute_s)
        assert found.makespan_s <= max(chained_s, without)


def test_of_many_equal_groups_the_uneven_rest_is_chained() -> None:
    """14 groups on four replicas: three each, and two that would leave two replicas idle."""
    found = choose([GROUP] * 14, settings=PlacementSettings(4))
    assert len(found.runahead_idxs) == 2
    assert choose([GROUP] * 16, settings=PlacementSettings(4)).policy == "whole_group"


def test_thousands_of_small_groups_hide_no_giant_one() -> None:
    small = [GroupLoad(64 + idx % 64, 4, 20, 4) for idx in range(3000)]
    giant = GroupLoad(60_000, 4, 64, 16)
    chain = dataclasses.replace(CPU_CHAIN, max_step_tokens=None)
    found = choose([*small, giant], chain, PlacementSettings(4, min_prefix_tokens=1024))
    assert found.runahead_idxs == (3000,)
    assert gain(found) > 0.4
    work_s = sum(CPU_COST.prefill_seconds(group.prefix_tokens) for group in small)
    assert found.makespan_s > work_s / 4 + 0.25 * CPU_COST.prefill_seconds(60_000)


def test_the_order_of_groups_changes_nothing() -> None:
    groups = [GroupLoad(1024 * n, n, 50, 10) for n in (1, 2, 3, 5, 7)]
    found = choose(groups)
    back = choose(groups[::-1])
    assert back.makespan_s == pytest.approx(found.makespan_s)
    assert {4 - idx for idx in back.runahead_idxs} == set(found.runahead_idxs)


def test_the_longest_groups_are_placed_first() -> None:
    one = GroupLoad(1024, 1, 0, 0)
    chain = dataclasses.replace(CPU_CHAIN, max_step_tokens=None)  # a prefix is a step
    found = choose([one, one, GroupLoad(2048, 1, 0, 0)], chain)
    short_s, long_s = (CPU_COST.prefill_seconds(length) for length in (1024, 2048))
    assert found.whole_group_s == pytest.approx(max(2 * short_s, long_s))


def test_prefixes_that_fill_no_step_share_one() -> None:
    """Of sixteen, each has a sixteenth of the step's own time, and not a step."""
    chain = dataclasses.replace(CPU_CHAIN, max_step_tokens=1024)
    step_s = CPU_COST.step_overhead_s + CPU_COST.sampled_token_s
    assert step_s > 0
    alone_s = CPU_COST.prefill_seconds(64)
    found = choose([GroupLoad(64, 1, 0, 0)] * 16, chain, PlacementSettings(1))
    assert found.whole_group_s == pytest.approx(16 * (alone_s - step_s) + step_s)


def test_a_chain_takes_until_every_replica_has_the_whole_prefix() -> None:
    chain = dataclasses.replace(CPU_CHAIN, link=Link(1e7))
    groups = [GroupLoad(4096, 1, 0, 0)]
    times = chain.times(search_split(chain, 4096, 2, "whole_prefix"))
    assert all_chained(groups, chain) == pytest.approx(max(times.whole_s))
    assert max(times.whole_s) > 1.05 * times.ttft_s


def test_replicas_without_a_member_recompute_nothing() -> None:
    """Three groups of one member on three replicas: one prefix each, whatever the policy."""
    found = choose([GroupLoad(4096, 1, 8, 4)] * 3, settings=PlacementSettings(3))
    assert found.recompute_s == pytest.approx(found.whole_group_s)
    assert found.policy == "whole_group"


# Decoding


def test_decoding_together_reads_the_weights_once() -> None:
    """Ten whole groups on one replica: as many steps as the longest output, not ten times."""
    cost = dataclasses.replace(COST, weights_s=1e-3, overhead_s=0.0)
    chain = Chain(cost, Link(1e9), 16)
    one = choose_placement([GroupLoad(16, 1, 0, 100)], chain, PlacementSettings(1))
    ten = choose_placement([GroupLoad(16, 1, 0, 100)] * 10, chain, PlacementSettings(1))
    prefill_s = cost.prefill_seconds(16)
    assert one.whole_group_s == pytest.approx(prefill_s + 100 * 4 * 1e-3)
    assert ten.whole_group_s == pytest.approx(10 * prefill_s + 100 * 4 * 1e-3)
    few_places = PlacementSettings(1, max_num_seqs=2)
    found = choose_placement([GroupLoad(16, 1, 0, 100)] * 10, chain, few_places)
    assert found.whole_group_s == pytest.approx(10 * prefill_s + 500 * 4 * 1e-3)


def test_decoding_reads_the_whole_context() -> None:
    cost = dataclasses.replace(COST, read_s_per_token=1e-3)
    chain = Chain(cost, Link(1e9), 16)
    found = choose_placement([GroupLoad(100, 3, 10, 5)], chain, PlacementSettings(1))
    none = dataclasses.replace(chain, cost=dataclasses.replace(cost, read_s_per_token=0.0))
    alone = choose_placement([GroupLoad(100, 3, 10, 5)], none, PlacementSettings(1))
    contexts = sum(110 + n for n in range(1, 6))
    more_s = found.whole_group_s - alone.whole_group_s
    assert more_s == pytest.approx(3 * contexts * 4 * 1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GroupLoad(0, 1, 0, 0),
        lambda: GroupLoad(1, 0, 0, 0),
        lambda: GroupLoad(1, 1, -1, 0),
        lambda: GroupLoad(1, 1, 0, -1),
        lambda: PlacementSettings(0),
        lambda: PlacementSettings(1, margin=1.0),
        lambda: PlacementSettings(1, margin=float("nan")),
        lambda: PlacementSettings(1, max_num_seqs=0),
        lambda: PlacementSettings(1, min_prefix_tokens=-1),
        lambda: choose([]),
    ],
)
def test_values_out_of_range_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(PlanError):
        make()
