"""Engines in processes of their own, which leave nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from benchmarks.provenance import child_environment


def end_on_sigterm() -> None:
    """Make SIGTERM raise `SystemExit` in this process: what `run_logged` has started ends with it,
    although that is in a session of its own."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def run_logged(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    timeout_s: float | None,
) -> str | None:
    """Run a command to its end, what it prints in a file; returns why it failed, if it did.

    Args:
        command: program and arguments.
        log: is overwritten.
        environment: variables beside those of this process.
        timeout_s: after so many seconds the command is killed, with all that it has started: an
            engine's own processes would keep the GPU's memory.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**child_environment(), **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"killed after {timeout_s:.0f} s; see {log.name}"
        finally:
            _end_group(process)
    if code == 0:
        return None
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return f"exit code {code}; {log.name} ends with: {lines[-1][:300] if lines else ''}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
