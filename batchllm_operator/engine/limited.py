"""Tries work in a process of its own, which is killed if it takes too long or too much memory."""

import json
import os
import resource
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from batchllm_operator.child_processes import die_with_parent

MEMORY_LIMIT: Final = 4 << 30  # bytes, beyond what the process has at its start
_CLOCK_FACTOR: Final = 4
_TOO_MUCH: Final = f"takes more than {MEMORY_LIMIT >> 30} GiB of memory"

Attempts = Sequence[Callable[[], object]]
Describe = Callable[[Exception], str]


def first_failure(attempts: Attempts, limit_s: float, describe: Describe) -> tuple[int, str] | None:
    """The index of the first attempt that fails, and the reason; None if none does.

    A fork of this process makes all attempts, so native code that never returns, or that takes the
    process down, is a failure too. It prints nothing.

    Args:
        attempts: raise an error if they fail.
        limit_s: seconds of CPU for each attempt; four times as many on the clock.
        describe: the reason that an error gives.
    """
    receiver, sender = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            _make(attempts, limit_s, describe, sender)
        finally:
            os._exit(0)
    os.close(sender)
    too_long = f"it takes more than {limit_s:g} s"
    try:
        with open(receiver, "rb", buffering=0) as results:  # noqa: PTH123
            for idx in range(len(attempts)):
                if not select.select([results], [], [], _CLOCK_FACTOR * limit_s)[0]:
                    return idx, too_long
                result = results.readline()
                if not result:
                    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                    is_late = end is not None and end.si_status == signal.SIGPROF
                    return idx, too_long if is_late else f"it ends its process, or {_TOO_MUCH}"
                if (reason := json.loads(result)) is not None:
                    return idx, str(reason)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None


def _make(attempts: Attempts, limit_s: float, describe: Describe, results: int) -> None:
    """Make the attempts in the forked process; write a line with the reason or null for each."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries print; errors are returned
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    statm = Path("/proc/self/statm").read_text(encoding="ascii")
    size = int(statm.split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError):  # less is allowed already
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for attempt in attempts:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        reason = None
        try:
            attempt()
        except MemoryError:
            reason = f"it {_TOO_MUCH}"
        # Any error of a library is the attempt's result, which the parent raises as its own.
        except Exception as error:  # noqa: BLE001
            reason = describe(error)
        os.write(results, json.dumps(reason).encode() + b"\n")
