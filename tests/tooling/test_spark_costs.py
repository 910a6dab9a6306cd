"""The costs of Spark that docs/howto/spark.md shows are printed from stored measurements."""

import json
from pathlib import Path

import pytest
from support.benchmark_modules import load

costs = load("spark_costs")
ROOT = Path(__file__).parents[2]
STORED = [ROOT / f"benchmarks/results/{name}_spark_cpu.json" for name in ("plan", "commit")]


def test_the_document_shows_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["spark_costs", *map(str, STORED)])
    costs.main()
    document = (ROOT / "docs/howto/spark.md").read_text()
    _, _, rest = document.partition("<!-- costs -->\n")
    shown, end, _ = rest.partition("<!-- end of costs -->")
    assert end
    assert shown.strip() == capsys.readouterr().out.strip()


def test_ranges_grow_when_there_are_enough_of_them() -> None:
    plan = {"marginal_us": 360.0, "marginal_shuffled_bytes": 4e3, "marginal_key_bytes": 6e3}
    small, large = (costs.row(plan, 36.0, num_rows, 100, 0.05) for num_rows in (10**8, 10**10))
    assert small[1:4] == ["0.40 TB", "4,470", "134 MB"]
    assert large[1:4] == ["40.00 TB", "10,000", "6,000 MB"]
    assert small[5:] == ["10.0", "1.0", "0.11 h", "0.55"]


def test_the_stored_runs_save_everything_in_bounded_memory() -> None:
    plan, commit = (json.loads(path.read_text()) for path in STORED)
    assert plan["saved_share"] >= 0.999
    assert max(each["peak_bytes"] for each in plan["plans"]) < 1.5e9
    assert commit["driver_peak_bytes"] < 1 << 30
