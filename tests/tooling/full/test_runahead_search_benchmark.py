"""A small run of the benchmark of the search for splits."""

from __future__ import annotations

from pathlib import Path

from support.benchmark_modules import load, run

benchmark = load("runahead_search")


def test_a_small_run_says_how_far_from_the_best_the_searched_splits_are(tmp_path: Path) -> None:
    report = run(tmp_path, "runahead_search", "--chains", "20", "--seed", "3")
    assert report["num_searches"] == 40
    assert 0 <= report["worst_share_longer"] <= benchmark.MOST_LONGER
    assert report["num_over_limit"] == 0
    assert report["git_sha"]
