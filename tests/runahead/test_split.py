"""Splits: the closed form, the search, and the table between what was searched."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples
from support.runahead import COST, CPU_CHAIN, CPU_COST, chains

from batchllm_operator.runahead.prediction import Chain, Split
from batchllm_operator.runahead.split import (
    SplitTable,
    closed_form,
    even_split,
    is_closed_form_near,
    search_split,
    split_prefixes,
)

rules = load("runahead_rules")
MOST_BLOCKS = {1: 500, 2: 4000, 3: 200, 4: 60, 5: 30}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Chain, int]:
    """A chain and a prefix of which all splits can be tried."""
    chain = draw(chains())
    p, size = chain.num_replicas, chain.block_size
    num_blocks = draw(st.integers(p, MOST_BLOCKS[p]))
    if draw(st.booleans()):
        even = -(-num_blocks // p)
        chain = dataclasses.replace(chain, max_chunk_blocks=draw(st.integers(even, 2 * even)))
    return chain, num_blocks * size - draw(st.integers(0, size - 1))


def check(chain: Chain, split: Split, num_tokens: int) -> None:
    """What the replicas rely on."""
    assert (len(split), sum(split)) == (chain.num_replicas, num_tokens)
    assert min(split) >= 1
    assert max(split) <= chain.max_chunk_blocks * chain.block_size
    assert not any(chunk % chain.block_size for chunk in split[:-1])


def seconds(chain: Chain, split: Split) -> float:
    return float(chain.seconds(np.array([split]))[0])


@settings(max_examples=examples(40))
@given(cases())
def test_each_way_gives_whole_blocks_that_fit_and_none_beats_the_best(
    case: tuple[Chain, int],
) -> None:
    chain, num_tokens = case
    least_s = rules.least_seconds(chain, num_tokens) if chain.num_replicas > 1 else 0.0
    for split in (
        even_split(chain, num_tokens),
        closed_form(chain, num_tokens),
        search_split(chain, num_tokens),
        split_prefixes(chain, [num_tokens, num_tokens])[num_tokens],
    ):
        check(chain, split, num_tokens)
        assert seconds(chain, split) >= least_s * (1 - 1e-12)


def test_chosen_splits_are_near_the_best() -> None:
    """The benchmark's own cases; it draws a thousand."""
    report = rules.measure(40, seed=3)
    assert report["num_closed_form"] > 0
    assert report["worst_closed_form_by_rule"] <= rules.MOST_LONGER
    assert report["worst_share_longer"]["chosen"] <= rules.MOST_LONGER
    assert report["worst_share_longer"]["even"] > 0.1
    assert report["mean_placement"] < 0.02


@pytest.mark.parametrize("num_replicas", [5, 8, 12])
def test_many_replicas_end_together_where_transfers_cost_nothing(num_replicas: int) -> None:
    """What the closed form can be checked against where there are too many splits to try."""
    cost = dataclasses.replace(COST, num_layers=32, s_per_pair=2e-9)
    chain = Chain(cost, num_replicas, 1e15)
    assert is_closed_form_near(chain, 32_768)
    split = split_prefixes(chain, [32_768])[32_768]
    alone_s = cost.step_seconds(32_768)
    assert alone_s / num_replicas <= seconds(chain, split) <= 1.05 * alone_s / num_replicas
    assert seconds(chain, split) < 0.8 * seconds(chain, even_split(chain, 32_768))
    assert list(split[:-1]) == sorted(split[:-1], reverse=True), "later tokens attend to more"


def test_the_cpu_that_was_measured_splits_where_it_did() -> None:
    """The optimum was flat around 2,304 to 2,816 of 4,096; 3.0 to 3.4 s became 1.4 to 1.7."""
    split = split_prefixes(CPU_CHAIN, [4096])[4096]
    assert 2304 <= split[0] <= 2816
    assert 3.0 <= CPU_COST.step_seconds(4096) <= 3.4
    assert 1.4 <= seconds(CPU_CHAIN, split) <= 1.7
    for first in (2304, 2816):
        assert seconds(CPU_CHAIN, (first, 4096 - first)) <= 1.2 * seconds(CPU_CHAIN, split)


def test_the_closed_form_is_trusted_for_long_chunks_of_many_layers_only() -> None:
    assert is_closed_form_near(CPU_CHAIN, 4096)
    assert not is_closed_form_near(CPU_CHAIN, 512)
    few = dataclasses.replace(CPU_COST, num_layers=4)
    heavy = dataclasses.replace(CPU_COST, weights_s=0.1)
    for cost in (few, heavy):
        assert not is_closed_form_near(dataclasses.replace(CPU_CHAIN, cost=cost), 4096)


def test_even_chunks_differ_by_a_block_at_most() -> None:
    for num_tokens, p, expected in (
        (8192, 4, (2048,) * 4),
        (100, 3, (32, 32, 36)),
        (97, 2, (48, 49)),
        (5, 1, (5,)),
    ):
        assert even_split(Chain(COST, p, 1e9), num_tokens) == expected


# The table


@given(st.integers(1, 40_000), st.sampled_from([1 << 40, 1, 31, 256]))
def test_any_length_that_can_be_split_has_a_split(num_tokens: int, most: int) -> None:
    chain = Chain(CPU_COST, 3, 1e9, 1e-4, block_size=32, max_chunk_blocks=most)
    table = SplitTable.search(chain, [96, 64 + 32 * min(most, 40)])
    if chain.can_split(num_tokens):
        check(chain, table.split(num_tokens), num_tokens)


def test_between_lengths_boundaries_are_interpolated_and_ends_keep_their_shares() -> None:
    chain = Chain(COST, 2, 1e9)
    table = SplitTable(chain, np.array([256, 1024]), np.array([[0.5], [0.75]]))
    assert table.split(640) == (640 * 5 // 8, 640 * 3 // 8), "in the middle between 256 and 1,024"
    assert table.split(256) == (128, 128)
    assert table.split(64) == (32, 32)
    assert table.split(130) == (64, 66)
    assert table.split(2048) == (1536, 512)
    firsts = [table.split(length)[0] for length in range(17, 4000)]
    assert firsts == sorted(firsts)


def test_of_many_lengths_splits_are_interpolated_and_nearly_as_good() -> None:
    """A chain of eight, whose weights weigh too much for the closed form, for each of 20 books."""
    cost = dataclasses.replace(CPU_COST, weights_s=0.05)
    chain = Chain(cost, 8, 1e9, 1e-4, block_size=32)
    lengths = [4_000 + 111 * idx for idx in range(20)]
    for length, split in split_prefixes(chain, lengths).items():
        check(chain, split, length)
        assert seconds(chain, split) <= 1.02 * seconds(chain, search_split(chain, length))
