"""The end-to-end benchmark with a tiny model, as users run it."""

import json
import os
import subprocess
import sys
from itertools import product
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


TINY = ("--model", "tiny", "--workloads", "case_1", "no_sharing", "--settings", "default")
POLICIES = ("stock_as_given", "batchllm_stock_attention")


def test_a_run_measures_every_policy_on_the_same_work_and_goes_on_where_it_stopped(
    tmp_path: Path,
) -> None:
    args = (*TINY, "--policies", *POLICIES)
    code, report, printed = run_benchmark(tmp_path, *args, "--json", "result.json")
    assert code == 0 and report is not None, printed
    assert (report["targets"], report["missing"]) == (None, {})
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    by_name = {(run["policy"], run["workload"]): run for run in runs}
    assert by_name.keys() == set(product(POLICIES, ("case_1", "no_sharing")))
    for workload in ("case_1", "no_sharing"):
        stock, ours = (by_name[policy, workload] for policy in POLICIES)
        for name in ("num_requests", "num_prompt_tokens", "num_output_tokens"):
            assert stock[name] == ours[name]
    assert by_name["stock_as_given", "case_1"]["plan_s"] == 0
    assert by_name["batchllm_stock_attention", "no_sharing"]["saving_ratio"] == 0
    ours = by_name["batchllm_stock_attention", "case_1"]
    assert ours["plan_s"] > 0 and ours["saving_ratio"] > 0.4 and ours["device"] == "cpu"
    assert ours["total_s"] == pytest.approx(ours["plan_s"] + ours["generate_s"], abs=1e-3)
    assert 0 < ours["tecd_s"] < ours["total_s"]
    assert sum(ours["steps"]["num_tokens"]) == (
        ours["num_prefill_tokens"] + ours["num_output_tokens"] - ours["num_requests"]
    )
    # The last run was cut off while it wrote its row.
    rows = (tmp_path / "rows.jsonl").read_text()
    *lines, last = rows.splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines) + last[:50])
    code, second, printed = run_benchmark(tmp_path, *args)
    assert code == 0 and second is not None, printed
    assert printed.count("== ") == 1
    kept = [row for row in second["rows"] if row in report["rows"]]
    assert (len(second["rows"]), len(kept)) == (4, 3)  # and one that was measured anew


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
    reasons = {missing["reason"] for missing in report["missing"].values()}
    assert reasons == {"no time was left"}
