"""Updates an attempt's progress.json from a thread of its own (ADR 22)."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Final

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.run.shard_tally import DEFAULT_INTERVAL_S, ShardTally
from batchllm_operator.secrets.masking import Masker
from batchllm_operator.shards.attempts import MOST_INTERVAL_S, PROGRESS_FILE
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Counts

INTERVAL_VARIABLE: Final = "BATCHLLM_PROGRESS_OBJECT_INTERVAL_S"
"""Environment variable: seconds between two writes."""
_LEAST_INTERVAL_S: Final = 0.1
_END_WAIT_S: Final = 5.0
"""Upper bound of the wait for the last write at the end of a run."""
_QUIET_S: Final = 86_400.0
"""A process without a finished row for so long hangs, and must not hold off `gc`."""
_MAX_ERROR_CHARS: Final = 300

_log = logging.getLogger(__name__)


def interval_s() -> float:
    """Seconds between two writes, from the environment."""
    text = os.environ.get(INTERVAL_VARIABLE, "").strip()
    try:
        seconds = float(text or DEFAULT_INTERVAL_S)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        _log.warning("%s: %r isn't a number of seconds", INTERVAL_VARIABLE, text)
        return DEFAULT_INTERVAL_S
    return min(max(seconds, _LEAST_INTERVAL_S), MOST_INTERVAL_S)


class LiveProgress:
    """Writes all snapshots of a tally to the attempt's folder, in order, from a thread.

    A failing storage leads to a warning; a hanging one delays the end by at most five seconds.

    Args:
        folder: the attempt's.
        every_s: seconds between two writes.
        also: called by the thread after each write but the last.
    """

    def __init__(
        self, folder: Folder, tally: ShardTally, every_s: float, also: Callable[[], object]
    ) -> None:
        self._folder, self._tally, self._every_s, self._also = folder, tally, every_s, also
        self._wake, self._ended = threading.Event(), threading.Event()
        # A daemon, so that a hanging write doesn't keep the process alive.
        self._thread = threading.Thread(target=self._run, name="batchllm-progress", daemon=True)
        self._has_warned = False
        self._news: tuple[object, float] | None = None
        """State and rows at their last change, and the attempt's seconds then."""

    def start(self) -> None:
        """Start the thread, which writes at once."""
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            self._warn(error)

    def write_soon(self) -> None:
        self._wake.set()  # doesn't wait for the write

    def end(self, error: BaseException | None, stored: Counts) -> None:
        """Write the last state: `finished` without an error, `stopped` by a `KeyboardInterrupt`
        (such as `Interrupted`), else `failed`; see `ShardTally.end`."""
        if error is None or isinstance(error, KeyboardInterrupt):
            self._tally.end("finished" if error is None else "stopped", stored)
        else:
            self._tally.end("failed", stored, shown_error(error))
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_END_WAIT_S)
            if self._thread.is_alive():
                _log.warning("the storage takes long: the end isn't in %s (yet)", PROGRESS_FILE)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._ended.is_set()
            try:
                self._write_news(is_last=is_last)
            # Any error: without this thread, the attempt would look dead.
            except Exception as error:  # noqa: BLE001
                self._warn(error)
            if not is_last:
                self._also()
                self._wake.wait(self._every_s)

    def _write_news(self, *, is_last: bool) -> None:
        progress = self._tally.snapshot()
        seen = (progress.state, progress.done.num_rows)
        if self._news is None or self._news[0] != seen:
            self._news = (seen, progress.elapsed_s)
        elif progress.elapsed_s - self._news[1] > _QUIET_S and not is_last:
            return
        self._folder.write_bytes(PROGRESS_FILE, progress.to_bytes())

    def _warn(self, error: Exception) -> None:
        """Warn once: the next write may succeed, and no result depends on it."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the run goes on, but its progress can't be seen: %s", error)


def shown_error(error: BaseException) -> str:
    """The first line of an error, without credentials, clipped to 300 characters."""
    text = Masker.of(os.environ)(str(error))
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not isinstance(error, BatchLLMError) or not line:
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    line = line.encode(errors="replace").decode()  # lone surrogates can't be stored
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 1] + "…"
