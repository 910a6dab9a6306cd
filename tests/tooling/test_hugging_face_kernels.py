"""The folder kernels/ must not pass for Hugging Face's package of that name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_an_installation_maps_nothing_but_our_packages(tmp_path: Path) -> None:
    """From anywhere."""
    names = ("kernels", "dags", "tests", "batchllm_kernels", "batchllm_operator")
    program = f"import importlib.util\nfor name in {names}: print(importlib.util.find_spec(name))"
    done = run_python(program, tmp_path)
    lines = done.stdout.splitlines()
    assert [line == "None" for line in lines] == [True] * 3 + [False] * 2, done.stderr
