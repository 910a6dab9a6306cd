"""The end-to-end benchmark with a tiny model, as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.benchmark_modules import ROOT


def run_benchmark(folder: Path, *args: str) -> tuple[int, dict[str, Any] | None, str]:
    """Exit code, the last line, and all that was printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.end_to_end", "--out", str(folder), *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    last = next((line for line in reversed(lines) if line.startswith("{")), None)
    return done.returncode, json.loads(last) if last else None, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run of two policies."""
    folder = tmp_path_factory.mktemp("end-to-end")
    names = ("stock_as_given", "batchllm_stock_attention")
    code, report, printed = run_benchmark(
        folder,
        *("--model", "tiny", "--workloads", "case_1", "no_sharing", "--policies", *names),
        *("--settings", "default", "--json", "result.json"),
    )
    assert code == 0, printed
    assert report is not None
    return folder, report


def test_a_run_measures_every_policy_on_the_same_work(tiny: tuple[Path, dict[str, Any]]) -> None:
    folder, report = tiny
    runs = json.loads((folder / "result.json").read_text())["runs"]
    assert {(each["policy"], each["workload"]) for each in runs} == {
        (policy, workload)
        for policy in ("stock_as_given", "batchllm_stock_attention")
        for workload in ("case_1", "no_sharing")
    }
    for workload in ("case_1", "no_sharing"):
        alike = [each for each in runs if each["workload"] == workload]
        for name in ("num_requests", "num_prompt_tokens", "num_output_tokens"):
            assert len({each[name] for each in alike}) == 1
    by_name = {(each["policy"], each["workload"]): each for each in runs}
    ours = by_name["batchllm_stock_attention", "case_1"]
    assert ours["plan_s"] > 0
    assert by_name["stock_as_given", "case_1"]["plan_s"] == 0
    assert ours["total_s"] == pytest.approx(ours["plan_s"] + ours["generate_s"], abs=1e-3)
    assert 0 < ours["tecd_s"] < ours["total_s"]
    assert sum(ours["steps"]["num_tokens"]) == (
        ours["num_prefill_tokens"] + ours["num_output_tokens"] - ours["num_requests"]
    )
    assert ours["saving_ratio"] > 0.4
    assert by_name["batchllm_stock_attention", "no_sharing"]["saving_ratio"] == 0
    assert ours["device"] == "cpu"
    assert report["targets"] is None
    assert report["missing"] == {}


def test_the_same_command_goes_on_where_it_stopped(tiny: tuple[Path, dict[str, Any]]) -> None:
    folder, report = tiny
    rows = (folder / "rows.jsonl").read_text()
    again = folder / "again"
    again.mkdir()
    lines = rows.splitlines(keepends=True)
    # The last run was cut off while it wrote its row.
    (again / "rows.jsonl").write_text("".join(lines[:-1]) + lines[-1][:50])
    names = ("stock_as_given", "batchllm_stock_attention")
    code, second, printed = run_benchmark(
        again,
        *("--model", "tiny", "--workloads", "case_1", "no_sharing", "--policies", *names),
        *("--settings", "default"),
    )
    assert code == 0, printed
    assert second is not None
    assert printed.count("== ") == 1
    assert [each["policy"] for each in second["rows"]] == [
        each["policy"] for each in report["rows"]
    ]
    kept = [each for each in second["rows"] if each in report["rows"]]
    assert len(kept) == 3  # and one that was measured anew


def test_an_engine_that_cannot_start_fails_the_benchmark(tmp_path: Path) -> None:
    code, report, printed = run_benchmark(
        tmp_path,
        *("--model", "tiny", "--workloads", "case_1", "--policies", "stock_sorted"),
        *("--settings", "default", "--engine", '{"extra_args": {"no_such_argument": 1}}'),
    )
    assert code == 1, printed
    assert report is not None
    assert report["rows"] == []
    assert "no_such_argument" in report["missing"]["stock_sorted default"]["reason"]


def test_an_engine_gets_no_time_that_is_not_left(tmp_path: Path) -> None:
    code, report, printed = run_benchmark(
        tmp_path, "--model", "tiny", "--workloads", "case_1", "--budget-s", "0"
    )
    assert code == 3, printed
    assert report is not None
    assert {each["reason"] for each in report["missing"].values()} == {"no time was left"}
