"""A command measured from outside, with all processes that it starts."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks.peers import meter

_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.5
_LINGER_S: Final = 10.0
_TIMEOUT_S: Final = 1_200.0


class Measured(NamedTuple):
    """One run of a command, with all processes."""

    code: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Most that they held together (proportional set sizes), by a look every half second."""
    counts: meter.Counts
    num_orphans: int
    """Processes that still ran ten seconds after the command had ended or been killed."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that none escapes."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, kill_at: int | None = None
) -> Measured:
    """Run a command to its end, or until its engine has finished `kill_at` requests: then its
    first process gets SIGKILL. What is left running ends in any case. `folder` gets its log."""
    counts = folder / "meter"
    counts.mkdir()
    waited_s, began_at = _waited_s(), time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**variables, meter.FOLDER: str(counts)},
            start_new_session=True,
        )
    used: dict[psutil.Process, float] = {}
    peak = 0
    while process.poll() is None:
        peak = max(peak, _look(used))
        is_late = time.monotonic() - began_at > _TIMEOUT_S
        if is_late or (kill_at is not None and meter.read(counts).num_finished >= kill_at):
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
    wall_s = time.monotonic() - began_at
    num_orphans = _end_orphans(used)
    # The kernel's sum lacks processes whose parents don't wait for them.
    cpu_s = max(_waited_s() - waited_s, sum(used.values()))
    return Measured(process.returncode, wall_s, cpu_s, peak, meter.read(counts), num_orphans)


def _look(used: dict[psutil.Process, float]) -> int:
    """Note the CPU time of each descendant; returns the bytes that all hold."""
    num_bytes = 0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):  # has ended
            used[each] = sum(each.cpu_times()[:2])
            rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
            num_bytes += int(rollup.partition("\nPss:")[2].split()[0]) << 10 if rollup else 0
    return num_bytes


def _end_orphans(used: dict[psutil.Process, float]) -> int:
    """Give processes some seconds to end, then count and kill them."""
    deadline, num_orphans = time.monotonic() + _LINGER_S, 0
    while left := psutil.Process().children(recursive=True):
        _look(used)
        if time.monotonic() > deadline:
            num_orphans = num_orphans or len(left)
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return num_orphans


def _waited_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
