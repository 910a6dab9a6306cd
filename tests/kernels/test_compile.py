"""Kernels compile for a chip that isn't there; `full/` has all that ship, for all chips."""

from __future__ import annotations

import json
from pathlib import Path

from support.compiler import run_script

# Each kernel once, attention with a cache of each width, and with extras. The last one has
# settings that want too much of the chip.
SOME = """
import sys
from dataclasses import replace
from functools import partial
from batchllm_kernels import compile

def some(arch):
    for name in compile.SCHEDULE_KERNELS:
        yield partial(compile.compile_schedule_kernel, arch, name)
    yield partial(compile.compile_merge_kernel, arch, 128)
    plain, _, _, fp8_with_extras = list(compile.shipped_variants(arch))[:4]
    crowded = replace(plain, launch=replace(plain.launch, programs_per_processor=99))
    for variant in (plain, fp8_with_extras, crowded):
        yield partial(compile.compile_variant, variant)

compile._jobs = some
sys.exit(compile.main(sys.argv[1:]))
"""


def test_each_kernel_compiles_and_settings_that_do_not_fit_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    args = "--arch", "sm90", "--jobs", "1", "--json", str(file)
    done = run_script(SOME, *args, cache=tmp_path / "cache")
    assert done.returncode == 1, done.stdout + done.stderr
    *good, crowded = json.loads(file.read_text())
    assert len(good) == 4 + 1 + 2
    for report in good:
        assert report["usage"]["spill_bytes"] <= 64
        assert report["usage"]["programs"] >= report["wanted_programs"]
        assert report["fault"] is None
    assert "the settings want 99" in crowded["fault"]
    assert done.stdout.count("FAULT: ") == 1
