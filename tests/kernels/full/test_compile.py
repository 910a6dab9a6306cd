"""Every kernel that ships compiles for every chip, in processes that don't interpret."""

from __future__ import annotations

import json
from pathlib import Path

from support.compiler import run_script

# Each entry of the settings once: half of them plain, half with window and soft cap, so that each
# chip, head size and width of the cache comes with and without.
ALL = """
import sys
from batchllm_kernels import compile

shipped = compile.shipped_variants
chips = list(compile.ARCHITECTURES)

def half(arch):
    variants = list(shipped(arch))
    for number, pair in enumerate(zip(variants[::2], variants[1::2], strict=True)):
        yield pair[(number // 2 + number + chips.index(arch)) % 2]

compile.shipped_variants = half
sys.exit(compile.main(sys.argv[1:]))
"""

TOO_WIDE = """
import torch
from batchllm_kernels.compile import Variant, compile_variant
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling
wide = LaunchConfig(Tiling(16, 32, 2), Tiling(128, 128, 3), 4, 1, {})
print(compile_variant(Variant("sm80", 128, torch.bfloat16, wide)).fault)
"""


def test_everything_compiles_and_fits_its_chip(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    done = run_script(ALL, "--jobs", "1", "--json", str(file), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(file.read_text())
    assert len(reports) == 4 * (4 + 4 + 4 * 2)  # chips x (schedule, merging, head sizes x widths)
    assert not [report for report in reports if report["fault"]]


def test_tiles_that_are_far_too_large_are_noticed(tmp_path: Path) -> None:
    done = run_script(TOO_WIDE, cache=tmp_path)
    assert done.stdout.startswith("spills") or "shared memory" in done.stdout, done.stderr
