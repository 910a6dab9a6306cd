"""What ships compiles for every chip, in processes that don't interpret."""

from __future__ import annotations

import json
from pathlib import Path

from support.compiler import run_script

from batchllm_kernels.compile import SCHEDULE_REQUESTS

# Each kernel of the schedule, for steps of each size, and of merging for one chip of each vendor.
# Each entry of the settings once: half of them plain, half with window and soft cap, so that each
# chip, head size and width of the cache comes with and without.
ALL = """
import sys
from functools import partial
from batchllm_kernels import compile

chips = list(compile.ARCHITECTURES)

def half(arch):
    chip = chips.index(arch)
    for name in compile.SCHEDULE_KERNELS[chip % 2::2]:
        for requests in compile.SCHEDULE_REQUESTS:
            yield partial(compile.compile_schedule_kernel, arch, name, requests)
    for head_dim in compile.HEAD_DIMS[chip % 2::2]:
        yield partial(compile.compile_merge_kernel, arch, head_dim)
    variants = list(compile.shipped_variants(arch))
    for number, pair in enumerate(zip(variants[::2], variants[1::2], strict=True)):
        variant = pair[(number // 2 + number + chip) % 2]
        yield partial(compile.compile_variant, variant)

compile._jobs = half
sys.exit(compile.main(sys.argv[1:]))
"""

TOO_WIDE = """
from batchllm_kernels.compile import Variant, compile_variant
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling
wide = LaunchConfig(128, 16, Tiling(16, 32, 2), Tiling(128, 128, 3), 4, 1, {})
print(compile_variant(Variant("sm80", wide)).fault)
"""


def test_everything_compiles_fits_its_chip_and_keeps_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    done = run_script(ALL, "--jobs", "1", "--json", str(file), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(file.read_text())
    schedule = 2 * len(SCHEDULE_REQUESTS)
    assert len(reports) == 4 * (schedule + 2 + 4 * 2)  # chips x (.., merging, head sizes x widths)
    assert not [report for report in reports if report["fault"]]


def test_tiles_that_are_far_too_large_are_noticed(tmp_path: Path) -> None:
    done = run_script(TOO_WIDE, cache=tmp_path)
    assert done.stdout.startswith("spills") or "shared memory" in done.stdout, done.stderr
