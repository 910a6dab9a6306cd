"""Stops a run in order: open parts are finished, and no new ones are begun."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from batchllm_operator.amounts import counted
from batchllm_operator.errors import Interrupted, LimitError

_log = logging.getLogger(__name__)


class Drain:
    """Whether a run has been asked to finish its open parts and stop."""

    def __init__(self) -> None:
        self.has_begun = False
        self.limit: LimitError | None = None
        """Why, if it wasn't a signal."""
        self._limit_s: float | None = None
        self.num_open_parts: Callable[[], int] = lambda: 0
        """Parts that the engine works on; set by the worker."""

    def begin(self, why: str, limit: LimitError | None = None) -> None:
        """Let no part be opened any more; any thread may call it, the first time counts."""
        if self.has_begun:
            return
        self.limit, self.has_begun = limit, True
        most = "" if self._limit_s is None else f", for at most {self._limit_s:.0f} s"
        _log.info("%s: finishing %s%s", why, counted(self.num_open_parts(), "open part"), most)
        if self._limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def end(self) -> None:
        """Clear the time limit, because no part is open any more and the rest is quick."""
        if self.has_begun:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, *, num_left: int) -> None:
        """Raise `Interrupted`, or the `limit`, if draining has begun and `num_left` parts haven't
        been generated."""
        if self.has_begun and num_left:
            raise self.limit or Interrupted(signal.SIGTERM)

    def reason_of(self, error: BaseException) -> BaseException:
        """The limit, if its open parts took too long or a signal came meanwhile; or the error."""
        return (isinstance(error, Interrupted) and self.limit) or error

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
            self.begin("asked to stop")

        self._limit_s = limit_s
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        signal.signal(signal.SIGTERM, begin)
        signal.signal(signal.SIGALRM, stop)
        try:
            yield self
        finally:
            self._limit_s = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
