"""Runs `batchllm` commands as processes of their own, without importing everything each time.

A server that has imported the package, and has done a small job, forks a child for each command.
The child is an ordinary process: it has its own pid, its own threads, and kill -9 hits it and
nothing else.
"""

import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from benchmarks.faults.inside import hurry, shift_clock, watch_engine, watch_writes
from benchmarks.faults.tables import set_environment

_KILLED: Final = -signal.SIGKILL
_SERVER: Final = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Command:
    """A `batchllm` command and what surrounds it."""

    args: Sequence[str]
    log: Path
    """Where stdout and stderr are appended."""
    engine_log: Path
    """See `inside.watch_engine`."""
    root: Path
    """The lake's folder, see `tables.set_environment`."""
    endpoint: str | None = None
    """Of S3; None for a lake on disk."""
    kill_at_write: int | None = None
    """kill -9 before the file operation of this number, from 1."""
    steps: Path | None = None
    """A named pipe: the command waits for a byte from it before each file operation."""
    max_file_bytes: int | None = None
    """Writing more than that into one file fails (RLIMIT_FSIZE)."""
    pace: float = 1.0
    """See `inside.hurry`."""
    clock_ahead_s: float = 0.0
    """See `inside.shift_clock`."""


class Child:
    """A command that runs, or has ended."""

    def __init__(self, command: Command) -> None:
        self._process = _SERVER.Process(target=_run, args=(command,))
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> int | None:
        """The same, after at most `timeout_s`."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> bool:
        """kill -9; whether that is what ended it."""
        self.send(signal.SIGKILL)
        return self.wait(30) == _KILLED


def start_server() -> None:
    """Let the server do what each command would repeat; it ends with this process."""
    _SERVER.set_forkserver_preload(["benchmarks.faults.warm_up"])


def _run(command: Command) -> NoReturn:
    """Be the command."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        output = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        set_environment(command.root, command.endpoint)
        if command.max_file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limits = (command.max_file_bytes, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        watch_engine(command.engine_log)
        writes = Path(f"{command.engine_log}.writes")
        watch_writes(writes, command.kill_at_write, command.steps)
        hurry(command.pace)
        if command.clock_ahead_s:
            shift_clock(command.clock_ahead_s)
        from batchllm_operator.cli import main

        code = main(command.args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 70
    except BaseException:  # noqa: BLE001 - nothing may come back to the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
