"""The kernel's benchmark as it is run without a GPU."""

import json
from pathlib import Path

import pytest
from support.benchmark_modules import load, run

workloads = load("kernel_workloads")
gate = load("kernel_gate")


def test_without_a_gpu_the_gate_runs_and_rows_hold_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    report = run(tmp_path, "kernel", "--quick", "--json", "report.json")
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["gate"], report["device"]) == ("pass", "cpu")
    assert report["num_gate_checks"] == len(gate.interpreter_settings())
    assert set(report["baselines_missing"]) == {"fa3", "triton_unified", "flashinfer_cascade"}
    assert len(report["rows"]) == len(workloads.settings(quick=True))
    for row in report["rows"]:
        assert 0 < row["unique_kv_bytes"] <= row["plain_kv_bytes"]
        assert "times" not in row
    assert {target["met"] for target in report["targets"]} == {None}
