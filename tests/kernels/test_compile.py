"""Every kernel that ships compiles for every chip, in processes that don't interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_compiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    command = [sys.executable, "-P", "-m", "batchllm_kernels.compile", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
def test_everything_compiles_and_fits_the_chip(arch: str, tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    done = run_compiler("--arch", arch, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(file.read_text())
    assert len(reports) == 4 + 4 + 4 * 2 * 2  # schedule, merging, head sizes x widths x extras
    for report in reports:
        assert report["usage"]["spill_bytes"] <= 64
        assert report["usage"]["programs"] >= report["wanted_programs"]
        assert report["fault"] is None


def test_faults_are_noticed() -> None:
    """A tile far too large: the same check that passes above."""
    script = """
import torch
from batchllm_kernels.compile import Variant, compile_variant
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling
wide = LaunchConfig(Tiling(16, 32, 2), Tiling(128, 128, 3), 4, 1, {})
print(compile_variant(Variant("sm80", 128, torch.bfloat16, wide)).fault)
crowded = LaunchConfig(Tiling(16, 32, 2), Tiling(16, 32, 2), 4, 9, {})
print(compile_variant(Variant("gfx942", 64, torch.bfloat16, crowded)).fault)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("spills") or "shared memory" in first
    assert "the settings want 9" in second
