"""What is watched inside a command: the rows it finishes, and the files it writes."""

import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Final, NamedTuple

from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.engine.protocol import EngineOutput, EngineRequest
from batchllm_operator.run import live_progress, shard_queue, shard_run, shard_sight, worker
from batchllm_operator.run.live_progress import DEFAULT_INTERVAL_S, INTERVAL_VARIABLE
from batchllm_operator.run.shard_run import ShardRun
from batchllm_operator.shards import attempts as shard_progress
from benchmarks.faults.job import SPILL_ROWS

_WRITES: Final = frozenset({"os.rename", "os.link", "os.remove", "os.mkdir"})


def watch_engine(log: Path) -> None:
    """Note each request whose answer the run has taken (`a 7 PID`), and when a spill is written
    (`w 1 PID`, then `w -1 PID`). Spills are as small as `SPILL_ROWS`.
    """
    setattr(shard_run, "SPILL_ROWS", SPILL_ROWS)  # noqa: B010 - it is final
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream, spill, pid = FakeEngine.stream, ShardRun.spill, os.getpid()

    def noted(self: FakeEngine, requests: Iterator[EngineRequest]) -> Iterator[EngineOutput]:
        for output in stream(self, requests):
            yield output
            os.write(descriptor, b"a %d %d\n" % (output.request_idx, pid))

    def spilled(self: ShardRun, **options: bool) -> None:
        os.write(descriptor, b"w 1 %d\n" % pid)
        try:
            spill(self, **options)
        finally:
            os.write(descriptor, b"w -1 %d\n" % pid)

    FakeEngine.stream = noted  # type: ignore[method-assign]
    ShardRun.spill = spilled  # type: ignore[method-assign]


class EngineLog(NamedTuple):
    """What processes have finished, by pid."""

    finished_by: dict[int, Counter[int]]
    """How often each request."""
    beside_spills: Counter[int]
    """Requests while another thread wrote a spill."""

    @property
    def finished(self) -> Counter[int]:
        """How often each request was finished, by any process."""
        return sum(self.finished_by.values(), Counter())


def read_engine_log(log: Path) -> EngineLog:
    found = EngineLog(defaultdict(Counter), Counter())
    num_writing = Counter[int]()
    for line in log.read_text().splitlines() if log.exists() else ():
        kind, number, pid = line.split()
        if kind == "w":
            num_writing[int(pid)] += int(number)
        else:
            found.finished_by[int(pid)][int(number)] += 1
            found.beside_spills[int(pid)] += num_writing[int(pid)] > 0
    return found


def hurry(pace: float) -> None:
    """Divide times by `pace`: those by which workers judge and wait for each other, and spill."""
    os.environ[INTERVAL_VARIABLE] = str(DEFAULT_INTERVAL_S / pace)
    for module, name in (
        (shard_progress, "SILENT_AFTER_S"),
        (shard_sight, "SILENT_AFTER_S"),
        (worker, "MOST_WAIT_S"),
        (worker, "_POLL_S"),
        (shard_run, "SPILL_S"),
    ):
        setattr(module, name, getattr(module, name) / pace)


def shift_clock(ahead_s: float) -> None:
    """Set the clock that this process writes into progress, and judges that of others by."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=ahead_s)

    for module in (shard_queue, live_progress):
        module.datetime = Shifted  # type: ignore[attr-defined]


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
