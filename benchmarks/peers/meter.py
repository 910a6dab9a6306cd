"""Counts what vLLM's scheduler does, in the same way for every contender.

vLLM loads `install` as a plugin in each of its processes. An engine keeps a file of its counts up
to date at every step, so that one that is killed leaves them, too.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = "PEERS_METER_FOLDER"
_FORM: Final = struct.Struct("<4q")


class Counts(NamedTuple):
    """Of one engine, or of several together."""

    num_prompt_tokens: int = 0
    """Computed, not found in the cache; those computed again after a preemption count again."""
    num_output_tokens: int = 0
    num_finished: int = 0
    """Requests."""
    generate_ns: int = 0
    """From when the engine could take requests to the end of its last step."""


def read(folder: Path) -> Counts:
    """The sum over the engines that have counted there."""
    found = [_FORM.unpack(file.read_bytes()) for file in folder.iterdir() if file.stat().st_size]
    return Counts(*map(sum, zip(*found, strict=True)))


def install() -> None:
    """Have vLLM's scheduler, and ours, which extends it, count in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    start, schedule, update = Scheduler.__init__, Scheduler.schedule, Scheduler.update_from_output
    if hasattr(schedule, "__wrapped__"):  # vLLM may load plugins twice
        return

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.meter, self.ready_ns = [0, 0, 0], time.monotonic_ns()
        path = Path(os.environ[FOLDER], f"{os.getpid()}-{id(self)}")
        self.meter_file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)

    @functools.wraps(schedule)
    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            begin = request.num_computed_tokens - num_tokens  # `schedule` has added them
            of_prompt = min(max(request.num_prompt_tokens - begin, 0), num_tokens)
            self.meter[0] += of_prompt
            self.meter[1] += num_tokens - of_prompt
        return output

    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = update(self, *args, **kwargs)
        outputs = [output for result in results.values() for output in result.outputs]
        self.meter[2] += sum(output.finish_reason is not None for output in outputs)
        since_ns = time.monotonic_ns() - self.ready_ns
        os.pwrite(self.meter_file, _FORM.pack(*self.meter, since_ns), 0)
        return results

    Scheduler.__init__, Scheduler.schedule = started, scheduled  # type: ignore[method-assign]
    Scheduler.update_from_output = updated  # type: ignore[method-assign]
