"""What a command prints where nobody reads it, or where nothing can be written."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "batchllm_operator"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["schema"], ["--version"]])
def test_a_closed_pipe_is_silent(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141 or (arguments == ["--version"] and unbuffered)


@pytest.mark.parametrize("arguments", [["schema"], ["--version"]])
def test_a_full_disk_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        out = full.open("w")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with out:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert re.fullmatch("batchllm: error: .*No space left on device\n", done.stderr)
    assert done.returncode == 1


def test_closed_streams_keep_nothing_from_working(tmp_path: Path) -> None:
    result = tmp_path / "gc.json"
    job = tmp_path / "none.yaml"
    code = f"exec {sys.executable} -m batchllm_operator"
    closed = subprocess.run(
        ["bash", "-c", f'{code} schema >&- 2>&-; exec 2>&-; {code} gc --job "$1"', "-", job],
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert closed.returncode == 0
    done = subprocess.run(
        ["bash", "-c", f'{code} gc --job "$1" --result "$2" >&-', "-", job, result],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
