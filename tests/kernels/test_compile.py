"""Kernels compile for a chip that isn't there, within their limits; `full/` has all chips."""

import json
from pathlib import Path

from support.compiler import run_script

# Each kernel once, attention with a cache of each width, and with extras. The last one has
# settings that want too much of the chip.
SOME = """
import sys
from dataclasses import replace
from kernel_settings import compile

chosen = [f"{name}, {compile.SCHEDULE_REQUESTS[-1]} requests" for name in compile.SCHEDULE_KERNELS]
chosen += ["merge, 128", "attention, 128, bfloat16"]
chosen += ["attention, 128, float8_e4m3fn, window, soft cap"]
shipped = {kernel.name: kernel for kernel in compile.shipped_kernels("sm90")}
crowded = replace(shipped["attention, 128, bfloat16"], programs=99)
compile.shipped_kernels = lambda arch: [*map(shipped.__getitem__, chosen), crowded]
sys.exit(compile.main(sys.argv[1:]))
"""


def test_each_kernel_keeps_its_limits_and_settings_that_do_not_fit_are_noticed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "reports.json"
    args = "--arch", "sm90", "--jobs", "1", "--json", str(file)
    done = run_script(SOME, *args, cache=tmp_path / "cache")
    assert done.returncode == 1, done.stdout + done.stderr
    *good, crowded = json.loads(file.read_text())
    assert len(good) == 4 + 1 + 2
    for report in good:
        assert report["numbers"]["spill_bytes"] <= 64
        assert report["numbers"]["programs"] >= report["wanted_programs"]
        assert report["numbers"]["instructions"] > 100
        assert report["fault"] is None
    *others, plain, with_window = (
        [name for name in each["numbers"] if name.startswith("async_depth")] for each in good
    )
    assert not any(others)
    assert plain == ["async_depth_wide", "async_depth_wide_masked", "async_depth_narrow"]
    assert with_window == plain[1:]
    assert [each["numbers"]["tensor_core"] > 0 for each in good] == [False] * 5 + [True] * 2
    assert "the settings want 99" in crowded["fault"]
    assert done.stdout.count("FAULT: ") == 1
