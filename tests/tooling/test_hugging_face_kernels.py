"""The folder kernels/ must not pass for Hugging Face's package of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("module", ["kernels", "dags", "tests"])
def test_an_installation_maps_nothing_but_our_packages(module: str, tmp_path: Path) -> None:
    program = f"import importlib.util; print(importlib.util.find_spec({module!r}))"
    done = run_python(program, tmp_path)
    assert done.stdout.split() == ["None"], done.stderr


def test_our_packages_are_importable_from_anywhere(tmp_path: Path) -> None:
    done = run_python("import batchllm_kernels, batchllm_operator", tmp_path)
    assert done.returncode == 0, done.stderr
