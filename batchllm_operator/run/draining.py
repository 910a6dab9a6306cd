"""Stops a run in order: open parts are finished, and no new ones are begun."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from batchllm_operator.amounts import counted
from batchllm_operator.errors import Interrupted

_log = logging.getLogger(__name__)


class Drain:
    """Whether a run has been asked to finish its open parts and stop."""

    def __init__(self) -> None:
        self.has_begun = False
        self.num_open_parts: Callable[[], int] = lambda: 0
        """Parts that the engine works on; set by the worker."""

    def end(self) -> None:
        """Clear the time limit, because no part is open any more and the rest is quick."""
        if self.has_begun:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, *, num_left: int) -> None:
        """Raise `Interrupted` if draining has begun and `num_left` parts haven't been generated."""
        if self.has_begun and num_left:
            raise Interrupted(signal.SIGTERM)

    @contextmanager
    def on_sigterm(self, limit_s: float) -> Iterator[Drain]:
        """Begin draining at the first SIGTERM; for the main thread.

        `Interrupted` is raised in the main thread at once if no part is open, at a second SIGTERM,
        or when the open parts take longer than `limit_s`; after that, a signal ends the process.
        This uses the timer of SIGALRM.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for last in (signal.SIGINT, signal.SIGTERM):  # one more ends the process
                signal.signal(last, signal.SIG_DFL)
            raise Interrupted(signal.SIGTERM)

        def begin(number: int, frame: FrameType | None) -> None:
            if self.has_begun or not self.num_open_parts():
                stop(number, frame)
            self.has_begun = True
            _log.info(
                "asked to stop: finishing %s, for at most %.0f s",
                counted(self.num_open_parts(), "open part"),
                limit_s,
            )
            signal.setitimer(signal.ITIMER_REAL, limit_s)

        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        signal.signal(signal.SIGTERM, begin)
        signal.signal(signal.SIGALRM, stop)
        try:
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
