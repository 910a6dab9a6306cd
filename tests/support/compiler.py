"""Processes in which Triton compiles: in that of the tests it interprets."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_script(script: str, *args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """`python -c SCRIPT ARG ...`, with an empty folder as Triton's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(str(ROOT / name) for name in ("kernels", "scripts"))
    environment |= {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # a seventh of the time; not in the code itself
    command = [sys.executable, "-P", "-c", script, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
