"""The tuner where it compiles."""

from __future__ import annotations

import json
from pathlib import Path

from support.compiler import run_script

COMPILE_TWO = """
import sys
from batchllm_kernels import tune
from batchllm_kernels.prefix_attention.config import Tiling
from batchllm_kernels.tuning.candidates import Grid
tilings = Tiling(16, 64, 3), Tiling(16, 64, 4)
tune.grid_for = lambda *_: Grid(tilings, ((Tiling(32, 32, 3), 4, {}),))
sys.exit(tune.main(sys.argv[1:]))
"""


def test_compile_only(tmp_path: Path) -> None:
    """For a chip that isn't there, in a process where Triton isn't interpreted."""
    out = tmp_path / "reports.json"
    args = ["--compile-only", "--arch", "sm90", "--head-dim", "64", "--kv-bits", "16"]
    args += ["--jobs", "1", "--json", str(out)]
    done = run_script(COMPILE_TWO, *args, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 3
    assert [row["current"] for row in rows].count(True) == 1
    assert "(current)" in done.stdout
    tried = {row["settings"].split()[0]: row for row in rows if not row["current"]}
    assert not any(row["fault"] for row in rows)
    # A fourth stage holds one more step of keys and values.
    more = tried["16x64/4"]["usage"]["shared_bytes"] - tried["16x64/3"]["usage"]["shared_bytes"]
    assert more >= 2 * 64 * 64 * 2
    assert tried["16x64/4"]["kv_bytes_in_flight"] >= tried["16x64/3"]["kv_bytes_in_flight"]
