"""The model of the KV-Runahead paper's machine against the paper's figures."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.benchmark_modules import load, run

benchmark = load("runahead_paper")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return list(benchmark.predict_rows())


def of(rows: list[Any], model: str, num_gpus: int, gbytes_per_s: float | None) -> dict[int, Any]:
    network = None if gbytes_per_s is None else gbytes_per_s * 1e9
    return {
        row.context: row
        for row in rows
        if (row.model, row.num_gpus, row.network_bytes_per_s) == (model, num_gpus, network)
    }


def test_speedups_over_tsp_are_within_15_percent_of_the_papers(rows: list[Any]) -> None:
    """Table 1, App. A, Fig. 8 (e, f)."""
    for model, num_gpus, network, context, figure, printed in (
        *(
            ("Llama 7B", 4, 300, context, "speedup", speedup)
            for context, speedup in ((2048, 1.11), (4096, 1.17), (8192, 1.30), (12288, 1.39))
        ),
        ("Llama 7B", 4, 300, 16384, "speedup", 1.42),
        ("Llama 7B", 8, 300, 16384, "speedup", 1.41),
        ("Llama 7B MQA", 8, 300, 16384, "speedup", 1.48),
        ("Llama 7B GQA8", 8, 300, 16384, "speedup", 1.46),
        ("Llama 7B", 4, 10, 8192, "even_speedup", 1.55),
        ("Llama 7B", 4, 10, 12288, "speedup", 1.79),
    ):
        row = of(rows, model, num_gpus, network)[context]
        predicted = row.tsp_s / (row.kvr_e_s if figure == "even_speedup" else row.kvr_s_s)
        assert predicted == pytest.approx(printed, rel=0.15)
        assert row.figures[figure] == pytest.approx(printed, rel=0.02)


def test_times_are_near_the_papers_with_one_set_of_constants(rows: list[Any]) -> None:
    fitted = [row for row in rows if row.fitted]
    errors = [error for row in fitted for error in row.errors().values()]
    assert len(errors) == 53
    assert max(map(abs, errors)) < math.log(1.2)
    assert benchmark.root_mean_square(fitted) < 0.05
    unseen = benchmark.unseen(rows)
    assert not any(row.fitted for some in unseen.values() for row in some)
    for label in ("8 GPUs", "other models"):
        assert 0 < benchmark.root_mean_square(unseen[label]) < 0.1


def test_the_constants_are_those_of_the_best_fit() -> None:
    """No constant, changed by a tenth, leaves smaller errors."""
    stored = benchmark.paper()["calibration"]
    best = benchmark.root_mean_square(list(benchmark.predict_rows(only_fitted=True)))
    for name, value in stored.items():
        for factor in (0.9, 1.1):
            changed = benchmark.predict_rows(stored | {name: value * factor}, only_fitted=True)
            assert benchmark.root_mean_square(list(changed)) > best, (name, factor)


def test_the_papers_observations_hold(rows: list[Any]) -> None:
    """Sec. 5 and App. B."""
    for network, p in ((300, 4), (300, 8), (10, 4)):
        by_context = of(rows, "Llama 7B", p, network)
        for row in by_context.values():
            assert row.kvr_s_s <= row.kvr_e_s, "searched chunks are no slower than even ones"
        long, short = by_context[12288], by_context[2048]
        assert long.kvr_e_s < long.tsp_s, "even those are faster than TSP"
        assert long.tsp_s / long.kvr_s_s > short.tsp_s / short.kvr_s_s, "more so if it is longer"
    alone, two = of(rows, "Llama 7B", 1, None), of(rows, "Llama 7B", 2, 10)
    assert two[12288].kvr_s_s < 0.55 * alone[12288].kvr_s_s


def test_chunks_are_those_of_the_paper_and_a_table_beats_tsp() -> None:
    """Fig. 6 (a): 9,728 of 16,384 tokens; Sec. 5: 10k between 8k and 12k."""
    searched, interpolated = benchmark.predict_splits()
    for split in (searched, interpolated):
        assert split["shares"] == pytest.approx(split["paper_shares"], abs=0.03)
        assert 1 <= split["paper_chunks_over_searched"] < 1.05
    assert interpolated["speedup"] > 1.3


def test_it_prints_a_table_and_all_of_it_as_json(tmp_path: Path) -> None:
    report = run(tmp_path, "runahead_paper")
    assert report["rms_error_fitted"] < 0.05
    assert {row["source"] for row in report["rows"]} >= {"Table 1", "Table 2", "Table 3"}
    assert len(report["splits"]) == 2
