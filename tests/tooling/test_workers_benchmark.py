"""The benchmark of workers: its ideal, its check of the table, and a small run of it."""

from pathlib import Path

import pytest
from support.benchmark_modules import load

benchmark = load("workers")
CASES = {case.name: case for case in benchmark.CASES}


@pytest.mark.parametrize(
    ("name", "expected_s"),
    [
        ("as_given", 60 + 1000),
        ("slow", 60 + 8000 / (7 + 1 / 3)),
        ("killed", 560 + 4000 / 7),
        ("joining", 620 + (8000 - 560 * 8) / 10),  # after their engines' start
    ],
)
def test_the_ideal_is_work_over_speed(name: str, expected_s: float) -> None:
    places = benchmark.places_of(CASES[name], half_s=560)
    assert benchmark.ideal_s(8000, places) == pytest.approx(expected_s)


def test_the_shards_of_a_lost_worker_are_run_by_others() -> None:
    row = benchmark.row_of(CASES["killed"], [0], num_shards=24, shard_requests=4)
    assert 1 <= row["makespan"] < 8 / 7 * 1.2
    assert row["num_takeovers"] >= 1


def test_a_wrong_table_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = benchmark.Job(tmp_path, num_shards=8, shard_requests=5, seed=0)
    monkeypatch.setattr(benchmark, "fake_text", lambda prompt: "another")
    with pytest.raises(SystemExit, match="no figures"):
        benchmark.measure(job, CASES["as_given"])
