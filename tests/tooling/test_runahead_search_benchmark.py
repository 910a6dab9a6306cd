"""The benchmark of the search for splits: what it draws, and a small run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.benchmark_modules import load, run

from batchllm_operator.planner.runahead import Chain, Goal, Split
from batchllm_operator.planner.runahead import search as search_module

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


def test_a_small_run_says_how_far_from_the_best_the_searched_splits_are(tmp_path: Path) -> None:
    report = run(tmp_path, "runahead_search", "--chains", "20", "--seed", "3")
    assert report["num_searches"] == 40
    assert 0 <= report["worst_share_longer"] <= benchmark.MOST_LONGER
    assert report["num_over_limit"] == 0
    assert report["git_sha"]


def test_a_split_that_is_far_from_the_best_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortest_first(chain: Chain, num_tokens: int, num_replicas: int, until: Goal) -> Split:
        first = [chain.block_size] * (num_replicas - 1)
        return (*first, num_tokens - sum(first))

    case = benchmark.draw(np.random.default_rng(3))
    case = dataclasses.replace(case, chain=dataclasses.replace(case.chain, max_step_tokens=None))
    assert benchmark.longer(case, "first_token")[0] <= benchmark.MOST_LONGER
    monkeypatch.setattr(benchmark, "search_split", shortest_first)
    assert benchmark.longer(case, "first_token")[0] > benchmark.MOST_LONGER
