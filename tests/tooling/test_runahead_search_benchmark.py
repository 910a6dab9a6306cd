"""The benchmark of the search for splits: what it draws, and what it sees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.benchmark_modules import load

from batchllm_operator.runahead.planning import Chain, Goal, Split
from batchllm_operator.runahead.planning import search as search_module

benchmark = load("runahead_search")


def test_cases_have_more_splits_than_the_searchs_first_grid() -> None:
    generator = np.random.default_rng(5)
    found = [benchmark.draw(generator) for _ in range(100)]
    for case in found:
        num_blocks = -(-case.num_tokens // case.chain.block_size)
        assert search_module._coarse_stride(num_blocks, case.num_replicas) > 1
        case.chain.check_length(case.num_tokens, case.num_replicas)
    assert {case.num_replicas for case in found} == {2, 3, 4, 5}
    assert len({case.chain.max_step_tokens is None for case in found}) == 2


def test_a_split_that_is_far_from_the_best_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortest_first(chain: Chain, num_tokens: int, num_replicas: int, until: Goal) -> Split:
        first = [chain.block_size] * (num_replicas - 1)
        return (*first, num_tokens - sum(first))

    case = benchmark.draw(np.random.default_rng(3))
    case = dataclasses.replace(case, chain=dataclasses.replace(case.chain, max_step_tokens=None))
    assert benchmark.longer(case, "first_token")[0] <= benchmark.MOST_LONGER
    monkeypatch.setattr(benchmark, "search_split", shortest_first)
    assert benchmark.longer(case, "first_token")[0] > benchmark.MOST_LONGER
