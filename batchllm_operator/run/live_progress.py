"""The progress of an attempt: counted in memory, and written by a thread of its own (ADR 22)."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from batchllm_operator.amounts import token_speed
from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import BatchLLMError, LimitError
from batchllm_operator.run.draining import Drain
from batchllm_operator.secrets.masking import Masker
from batchllm_operator.shards.attempts import (
    MOST_INTERVAL_S,
    PROGRESS_FILE,
    Attempt,
    ShardProgress,
    State,
)
from batchllm_operator.shards.usage import Usage
from batchllm_operator.stored_plan.counts import NOTHING, Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

INTERVAL_VARIABLE: Final = "BATCHLLM_PROGRESS_OBJECT_INTERVAL_S"
"""Environment variable: seconds between two writes."""
DEFAULT_INTERVAL_S: Final = 5.0
_LEAST_INTERVAL_S: Final = 0.1
_WINDOW_S: Final = 60
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


@dataclass(slots=True)
class Holder:
    """The process that runs shards, as far as they all share it."""

    worker: int = 0
    num_workers: int = 1
    num_gpus: int = 0
    every_s: float = DEFAULT_INTERVAL_S
    drain: Drain = field(default_factory=Drain)
    check_limits: Callable[[], object] = lambda: None
    """Called every few seconds from a thread; set by the worker."""
    observe: Observe | None = None
    _lap_began_at: float = field(default_factory=time.monotonic)

    def lap(self) -> float:
        """Seconds since the last call, for any shard, so that the engine's time is counted once."""
        before, self._lap_began_at = self._lap_began_at, time.monotonic()
        return self._lap_began_at - before


class LiveProgress:
    """Counts an attempt's outputs, and writes snapshots to its folder, in order, from a thread.

    One thread counts, any may take a `snapshot`. A failing storage leads to a warning; a hanging
    one delays the end by at most five seconds.

    Args:
        done: what earlier attempts have finished, with `num_parts_done` whole parts; as an
            attribute, with what this one has finished.
        also: called by the thread after each write but the last.
    """

    def __init__(
        self,
        plan: StoredPlan,
        shard_idx: int,
        attempt: Attempt,
        holder: Holder,
        done: Counts = NOTHING,
        num_parts_done: int = 0,
        *,
        also: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._shard = plan.shard(shard_idx)
        self._constant: dict[str, Any] = {
            "plan_id": plan.manifest.plan_id,
            "shard_idx": shard_idx,
            "attempt": attempt.number,
            "host": socket.gethostname(),
            "started_at": now(),
            "interval_s": holder.every_s,
            "worker": holder.worker,
            "num_workers": holder.num_workers,
            "num_gpus": holder.num_gpus,
            "num_rows": self._shard.num_rows,
            "num_parts": self._shard.num_parts,
        }
        self._clock, self._now = clock, now
        self.done, self._num_parts, self._num_rows_before = done, num_parts_done, done.num_rows
        self._num_generated, self._num_gpus = 0, holder.num_gpus
        self._window: tuple[tuple[float, Counts], ...] = ()
        """What was done before the first output of each second with one; replaced as a whole."""
        self._began_at = clock()
        self._running_at: float | None = None
        self._held_at: float | None = None
        self._ended_at: float | None = None
        self._state: State = "starting"
        self._error: str | None = None
        self._folder, self._every_s, self._also = attempt.folder, holder.every_s, also
        self._wake, self._ended = threading.Event(), threading.Event()
        # A daemon, so that a hanging write doesn't keep the process alive.
        self._thread = threading.Thread(target=self._run, name="batchllm-progress", daemon=True)
        self._has_warned = False
        self._news: tuple[object, float] | None = None
        """State and rows at their last change, and the attempt's seconds then."""

    def start(self) -> None:
        """Start the thread, which writes at once."""
        self._thread.start()

    def hold_gpus(self) -> None:
        """Count GPU time for this attempt from now on, until it ends; a second call does nothing.

        An attempt calls it at its start, or when the one before it in the same engine has ended.
        """
        if self._held_at is None:
            self._held_at = self._clock()

    def begin_running(self) -> None:
        self._running_at = self._clock()
        self._state = "running"
        self._wake.set()  # doesn't wait for the write

    @property
    def usage(self) -> Usage:
        """What this attempt has used by now."""
        return Usage(self._num_generated, self._held_s() * self._num_gpus)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def _held_s(self) -> float:
        held_at, ended_at = self._held_at, self._ended_at
        if held_at is None:
            return 0.0
        return (self._clock() if ended_at is None else ended_at) - held_at

    def count_generated(self, output: EngineOutput) -> None:
        """Count the tokens of an output, also if it isn't kept."""
        self._num_generated += output.num_output_tokens

    def count_output(self, output: EngineOutput, num_rows: int) -> None:
        self.count_generated(output)
        clock = self._clock()
        if not self._window or clock - self._window[-1][0] >= 1:
            self._window = (*self._window[1 - _WINDOW_S :], (clock, self.done))
        self.done += Counts.of([(output, num_rows)])

    def count_part(self) -> None:
        """Count a written part, whose outputs have been counted one by one."""
        self._num_parts += 1

    def end(self, error: BaseException | None, stored: Counts) -> None:
        """Write the last state: `finished` without an error, `stopped` by a `KeyboardInterrupt`
        (such as `Interrupted`) or a limit, else `failed`. Unless it is `finished`, outputs that
        aren't `stored` are lost."""
        state: State = "finished"
        if error is not None:
            is_signal = isinstance(error, KeyboardInterrupt)
            state = "stopped" if is_signal or isinstance(error, LimitError) else "failed"
            self.done, self._error = stored, None if is_signal else shown_error(error)
        self._ended_at = self._clock()
        self._state = state
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_END_WAIT_S)
        if self._thread.is_alive():
            _log.warning("the storage takes long: the end isn't in %s (yet)", PROGRESS_FILE)

    def snapshot(self) -> ShardProgress:
        running_at = self._running_at
        # Read last: another thread may have set these times a moment ago.
        clock, done, state = self._clock(), self.done, self._state
        elapsed_s = clock - self._began_at
        running_s = 0.0 if running_at is None else clock - running_at
        computed_per_s, output_per_s, rows_per_s = self._rates(clock, done, running_s)
        return ShardProgress(
            **self._constant,
            state=state,
            updated_at=self._now(),
            elapsed_s=elapsed_s,
            engine_start_s=elapsed_s - running_s,
            gpu_held_s=self._held_s(),
            num_parts_done=self._num_parts,
            done=done,
            num_generated_tokens=self._num_generated,
            computed_tokens_per_s=computed_per_s,
            output_tokens_per_s=output_per_s,
            eta_s=self._eta_s(state, done, running_s, rows_per_s),
            error=self._error,
        )

    def note(self, others: Iterable[Counts] = ()) -> str:
        """Speed over the last minute and the saving so far, for a progress line.

        Args:
            others: of the worker's other shards, which the saving counts, too.
        """
        clock, done = self._clock(), self.done
        running_s = 0.0 if self._running_at is None else clock - self._running_at
        speed = token_speed(*self._rates(clock, done, running_s)[:2])
        saving_ratio = Counts.total([done, *others]).saving_ratio or 0.0
        return f"{speed}, {100 * saving_ratio:.0f} % of prompt tokens saved"

    def _rates(self, clock: float, done: Counts, running_s: float) -> tuple[float, float, float]:
        """Computed prompt tokens, output tokens and rows per second, over the last minute or since
        the engine started."""
        recent = (counts for at, counts in self._window if clock - at < _WINDOW_S)
        before, span_s = next(recent, done), min(running_s, _WINDOW_S)
        if span_s <= 0:
            return 0.0, 0.0, 0.0
        return (  # at least 0, as outputs may be lost at the end
            max(0, done.num_computed_tokens - before.num_computed_tokens) / span_s,
            max(0, done.num_output_tokens - before.num_output_tokens) / span_s,
            max(0, done.num_rows - before.num_rows) / span_s,
        )

    def _eta_s(
        self, state: State, done: Counts, running_s: float, recent_rows_per_s: float
    ) -> float | None:
        """Time for the remaining rows, at the mean of this attempt's speed and the last minute's.

        The first is steady, the second follows changes in row lengths or of the machine. All rows
        count alike. None until the engine has generated one.
        """
        if state == "finished":
            return 0.0
        num_rows = done.num_rows - self._num_rows_before
        if state != "running" or num_rows <= 0 or running_s <= 0:
            return None
        rows_per_s = (num_rows / running_s + recent_rows_per_s) / 2
        return max(0, self._shard.num_rows - done.num_rows) / rows_per_s

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.clear()
            is_last = self._ended.is_set()
            try:
                progress = self.snapshot()
                seen = (progress.state, progress.done.num_rows)
                if self._news is None or self._news[0] != seen:
                    self._news = (seen, progress.elapsed_s)
                if is_last or progress.elapsed_s - self._news[1] <= _QUIET_S:
                    self._folder.write_bytes(PROGRESS_FILE, progress.to_bytes())
            # Any error: without this thread, the attempt would look dead.
            except Exception as error:  # noqa: BLE001
                self._warn(error)
            if not is_last:
                self._also()
                self._wake.wait(self._every_s)

    def _warn(self, error: Exception) -> None:
        """Warn once: the next write may succeed, and no result depends on it."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the run goes on, but its progress can't be seen: %s", error)


Observe = Callable[[LiveProgress], AbstractContextManager[object]]
"""Called with an attempt's progress at its start; the context that it returns is left after the
attempt's last state. Any thread may call `LiveProgress.snapshot` meanwhile."""


def shown_error(error: BaseException) -> str:
    """The first line of an error, without credentials, clipped to 300 characters."""
    text = Masker.of(os.environ)(str(error))
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not isinstance(error, BatchLLMError) or not line:
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    line = line.encode(errors="replace").decode()  # lone surrogates can't be stored
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 1] + "…"
