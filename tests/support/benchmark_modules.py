"""Benchmarks from tests: as modules, and as the commands that users give."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A module of benchmarks/, which isn't installed, without the repository on `sys.path`."""
    if "benchmarks" not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"benchmarks.{name}")


def run(folder: Path, name: str, *args: str) -> dict[str, Any]:
    """What `python -m benchmarks.NAME ARG ...` says in its last line, run in `folder`."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"benchmarks.{name}", *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
