"""What ships compiles for every chip, in processes that don't interpret."""

import json
import subprocess
import tomllib
from pathlib import Path

from kernel_settings.compile import SCHEDULE_REQUESTS
from support.compiler import run_script

# Each kernel of the schedule, for steps of each size, and of merging for one chip of each vendor.
# Each entry of the settings once: half of them plain, half with window and soft cap, so that each
# chip, head size and width of the cache comes with and without.
ALL = """
import sys
from kernel_settings import compile

chips, shipped_kernels = list(compile.ARCHITECTURES), compile.shipped_kernels

def half(arch):
    chip, shipped = chips.index(arch), list(shipped_kernels(arch))
    attention = [kernel for kernel in shipped if kernel.name.startswith("attention")]
    others = shipped[: -len(attention)]
    for number, pair in enumerate(zip(others[::2], others[1::2], strict=True)):
        if pair[0].name.startswith("merge"):
            yield pair[chip % 2]
        elif number % 2 == chip % 2:  # for steps of both sizes
            yield from pair
    for number, pair in enumerate(zip(attention[::2], attention[1::2], strict=True)):
        yield pair[(number // 2 + number + chip) % 2]

compile.shipped_kernels = half
sys.exit(compile.main(sys.argv[1:]))
"""

ONE = """
import sys
from kernel_settings import compile

compile.shipped_kernels = lambda arch: [compile.schedule_kernel(arch, "find_leaders", 16)]
sys.exit(compile.main(sys.argv[1:]))
"""

TOO_WIDE = """
from kernel_settings.compile import attention_kernel, compile_kernel
from batchllm_kernels.prefix_attention.config import LaunchConfig, Tiling
wide = LaunchConfig(128, 16, Tiling(16, 32, 2), Tiling(128, 128, 3), 4, 1, {})
print(compile_kernel(attention_kernel("sm80", wide, merge_here=True)).fault)
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


def test_limits_are_renewed_on_purpose_only(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        args = "--arch", "sm90", "--jobs", "1", "--limits", str(limits), *options
        return run_script(ONE, *args, cache=tmp_path / "cache")

    unknown = run()
    assert (unknown.returncode, limits.read_text()) == (1, "")
    assert "find_leaders, 16 requests" in unknown.stdout
    assert "FAULT: has no limits; --write-limits writes them\n" in unknown.stdout
    written = run("--write-limits")
    assert written.returncode == 0, written.stderr
    [kept] = tomllib.loads(limits.read_text())["sm90"].values()
    tighter = limits.read_text().replace(
        f"shared_bytes = {kept['shared_bytes']}", "shared_bytes = 0"
    )
    limits.write_text(tighter)
    passed = run()
    assert passed.returncode == 1
    assert "FAULT: passes its limits: " in passed.stdout
    assert "shared_bytes (0)\n" in passed.stdout
