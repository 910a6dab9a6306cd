"""Azurite, Microsoft's own double of Azure's Blob Storage, as a process of the tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from filelock import FileLock

_PACKAGE: Final = "azurite@3.37.0"  # the first that lists from a name on, as delta-rs asks
_FOLDER: Final = Path(__file__).parents[2] / "build" / "azurite"
ACCOUNT: Final = "devstoreaccount1"
KEY: Final = (  # public: everyone's
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextmanager
def azurite() -> Iterator[str]:
    """The endpoint of a new one, as the account has it, on a loopback port."""
    driver = pytest.importorskip("playwright._impl._driver")  # not in each environment
    _install()
    program = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    options = ("--blobPort", "0", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck")
    node, _ = driver.compute_driver_executable()  # Debian's may be too old
    command = (node, str(program), *options, "--disableTelemetry")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            listens = next(line for line in process.stdout if "successfully listens" in line)
            yield f"{listens.split()[-1]}/{ACCOUNT}"
        finally:
            process.terminate()
            process.communicate()  # it says goodbye


def _install() -> None:
    """Install it, once for all processes of tests; skip the test where it can't be had."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(_FOLDER.with_suffix(".lock")):
        done = _FOLDER / _PACKAGE
        if done.exists():
            return
        install = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts")
        try:
            (_FOLDER / "package.json").write_text("{}")  # else npm looks for one above
            # With --prefix npm would leave out the machine's own settings.
            subprocess.run([*install, _PACKAGE], check=True, cwd=_FOLDER)
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{_PACKAGE} can't be installed: {error}")
        done.touch()
