"""Runs `batchllm` commands as processes of their own, without importing everything each time.

A process that has imported the package forks a child for each command. The child is an ordinary
process: it has its own pid, its own threads, and kill -9 hits it and nothing else. The process
that forks starts no thread itself.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.faults.inside import hurry, shift_clock, watch_engine, watch_writes
from benchmarks.faults.tables import set_environment

_KILLED: Final = -signal.SIGKILL


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

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._zygote.code_of(self.pid, timeout_s=0)

    def wait(self, timeout_s: float) -> int | None:
        """The same, after at most `timeout_s`."""
        return self._zygote.code_of(self.pid, timeout_s)

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._zygote.call({"pid": self.pid, "signal": number})

    def kill(self) -> bool:
        """kill -9; whether that is what ended it."""
        self.send(signal.SIGKILL)
        return self.wait(30) == _KILLED


class Zygote:
    """The near end of a process that forks commands."""

    def __init__(self, warm_up: Callable[[], None]) -> None:
        """Fork it; the caller has no thread yet.

        Args:
            warm_up: called there first: it does what each command would repeat.
        """
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            near.close()
            _warm(warm_up)
            _serve(far)
        far.close()
        self._socket = near
        self._codes: dict[int, int] = {}

    def start(self, command: Command) -> Child:
        """Run a command."""
        fields = asdict(command).items()
        self.call({name: str(it) if isinstance(it, Path) else it for name, it in fields})
        while True:
            event = json.loads(self._socket.recv(1 << 16))
            if "started" in event:
                self._codes.pop(event["started"], None)  # of an earlier child with the same pid
                return Child(self, event["started"])
            self._note(event)

    def call(self, request: Mapping[str, Any]) -> None:
        """Send a request."""
        self._socket.send(json.dumps(request).encode())

    def code_of(self, pid: int, timeout_s: float) -> int | None:
        """How a child ended; None if it hasn't within `timeout_s`."""
        until = time.monotonic() + timeout_s
        while pid not in self._codes:
            left_s = max(0.0, until - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            self._note(json.loads(self._socket.recv(1 << 16)))
        return self._codes[pid]

    def close(self) -> None:
        """End it, and the children that it still has."""
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _note(self, event: Mapping[str, int]) -> None:
        self._codes[event["ended"]] = event["code"]


def _warm(warm_up: Callable[[], None]) -> None:
    """Do it quietly; Arrow's threads, the only ones that it leaves, are started again in a fork."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    kept = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in kept:
            os.dup2(quiet, number)
        warm_up()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - commands will say what is wrong
        pass
    for number, copy in kept:
        os.dup2(copy, number)
        os.close(copy)
    os.close(quiet)


def _serve(channel: socket.socket) -> NoReturn:
    """Fork a child for each request and tell how it ended, until the channel is closed."""
    wake, woken = os.pipe()
    for descriptor in (wake, woken):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as before the first command
    signal.set_wakeup_fd(woken)
    running: set[int] = set()
    while True:
        readable = select.select([channel, wake], [], [])[0]
        if wake in readable:
            os.read(wake, 4096)
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    running.remove(pid)
                    code = os.waitstatus_to_exitcode(status)
                    channel.send(json.dumps({"ended": pid, "code": code}).encode())
        if channel in readable:
            data = channel.recv(1 << 16)
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            request = json.loads(data)
            if "pid" in request:
                if request["pid"] in running:
                    os.kill(request["pid"], request["signal"])
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (wake, woken, channel.fileno()):
                    os.close(descriptor)
                _run(request)
            running.add(pid)
            channel.send(json.dumps({"started": pid}).encode())


def _run(request: Mapping[str, Any]) -> NoReturn:
    """Be the command."""
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        set_environment(Path(request["root"]), request["endpoint"])
        if (limit := request["max_file_bytes"]) is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        watch_engine(Path(request["engine_log"]))
        steps = None if request["steps"] is None else Path(request["steps"])
        writes = Path(request["engine_log"] + ".writes")
        watch_writes(writes, request["kill_at_write"], steps)
        hurry(request["pace"])
        if ahead_s := request["clock_ahead_s"]:
            shift_clock(ahead_s)
        from batchllm_operator.cli import main

        code = main(request["args"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 70
    except BaseException:  # noqa: BLE001 - nothing may come back to the loop that forked
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
