"""What is watched inside a command: the engine's requests, and the files it writes."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.engine.protocol import EngineOutput, EngineRequest

_WRITES: Final = frozenset({"os.rename", "os.link", "os.remove", "os.mkdir"})


def watch_engine(log: Path) -> None:
    """Note each request when the engine takes it (`t 7`) and when it has its answer (`a 7`)."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream = FakeEngine.stream

    def noted(self: FakeEngine, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        def taken() -> Iterator[EngineRequest]:
            for request in requests:
                os.write(descriptor, b"t %d\n" % request.request_idx)
                yield request

        for output in stream(self, taken()):
            os.write(descriptor, b"a %d\n" % output.request_idx)
            yield output

    FakeEngine.stream = noted  # type: ignore[method-assign]


def read_engine_log(log: Path) -> tuple[Counter[int], Counter[int]]:
    """How often each request was taken, and answered."""
    taken: Counter[int] = Counter()
    answered: Counter[int] = Counter()
    for line in log.read_text().splitlines() if log.exists() else ():
        kind, _, request_idx = line.partition(" ")
        (taken if kind == "t" else answered)[int(request_idx)] += 1
    return taken, answered


def watch_writes(log: Path, kill_at: int | None, steps: Path | None) -> None:
    """Count file operations from Python's side, and kill -9 this process before number `kill_at`.

    Libraries that write by themselves (delta-rs, Arrow's file systems) aren't seen. Before each
    operation the process waits for a byte from the named pipe `steps`, if there is one.
    """
    count = 0
    pipe = None if steps is None else os.open(steps, os.O_RDWR)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        is_write = event in _WRITES or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not is_write:
            return
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwrite(descriptor, b"%d\n" % count, 0)
        if pipe is not None:
            os.read(pipe, 1)

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.addaudithook(hook)
