"""transformers, started in the repository's root, does without the package `kernels`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Python puts the working folder first on its path, where `kernels` is found, as a namespace without
# a version.
PROGRAM = """
import importlib.util
import sys
assert sys.path[0] == ""
assert importlib.util.find_spec("kernels") is not None

from transformers.utils import is_kernels_available
assert not is_kernels_available()

import transformers.integrations.hub_kernels as hub_kernels
print(hub_kernels.LayerRepository.__module__)
"""


def test_transformers_falls_back_in_the_repository_root() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["transformers.integrations.hub_kernels"]
