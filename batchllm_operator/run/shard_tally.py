"""Counts an attempt's work in memory, for observers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from batchllm_operator.amounts import token_speed
from batchllm_operator.engine import EngineOutput
from batchllm_operator.run.draining import Drain
from batchllm_operator.shards.attempts import Attempt, ShardProgress, State
from batchllm_operator.stored_plan.counts import NOTHING, Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

DEFAULT_INTERVAL_S: Final = 5.0
_WINDOW_S: Final = 60
_STEP_S: Final = 1
"""Outputs within one second are one entry of the window."""


@dataclass(slots=True)
class Holder:
    """The process that runs shards, as far as they all share it."""

    worker: int = 0
    num_workers: int = 1
    num_gpus: int = 0
    every_s: float = DEFAULT_INTERVAL_S
    """Seconds between two progress objects."""
    drain: Drain = field(default_factory=Drain)
    observe: Observe | None = None
    _lap_began_at: float = field(default_factory=time.monotonic)

    def lap(self) -> float:
        """Seconds since the last call, for any shard, so that the engine's time is counted once."""
        before, self._lap_began_at = self._lap_began_at, time.monotonic()
        return self._lap_began_at - before


class ShardTally:
    """Counts an attempt's outputs; one thread counts, any may take a `snapshot`.

    Args:
        attempt: the attempt that begins now, at the shard `shard_idx` of the plan.
        done: what earlier attempts have finished, with `num_parts_done` whole parts.
        clock: monotonic seconds.

    Attributes:
        done: finished work of all attempts.
        num_rows_before: rows that earlier attempts have finished.
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
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.job, self.ds = plan.manifest.spec.name, plan.manifest.ds
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
        self.done, self._num_parts, self.num_rows_before = done, num_parts_done, done.num_rows
        self._window: tuple[tuple[float, Counts], ...] = ()
        """What was done before the first output of each second with one; replaced as a whole."""
        self._began_at = clock()
        self._running_at: float | None = None
        self._held_at: float | None = None
        self._ended_at: float | None = None
        self._state: State = "starting"
        self._error: str | None = None

    def hold_gpus(self) -> None:
        """Count GPU time for this attempt from now on, until it ends; a second call does nothing.

        An attempt calls it at its start, or when the one before it in the same engine has ended.
        """
        if self._held_at is None:
            self._held_at = self._clock()

    def begin_running(self) -> None:
        self._running_at = self._clock()
        self._state = "running"

    def count_output(self, output: EngineOutput, num_rows: int) -> None:
        clock = self._clock()
        if not self._window or clock - self._window[-1][0] >= _STEP_S:
            self._window = (*self._window[1 - _WINDOW_S // _STEP_S :], (clock, self.done))
        self.done += Counts.of([(output, num_rows)])

    def count_part(self) -> None:
        """Count a written part, whose outputs have been counted one by one."""
        self._num_parts += 1

    def end(self, state: State, stored: Counts, error: str | None = None) -> None:
        """Set the last state; unless it is `finished`, outputs that aren't `stored` are lost."""
        if state != "finished":
            self.done = stored
        self._error = error
        self._ended_at = self._clock()
        self._state = state

    def snapshot(self) -> ShardProgress:
        clock, done, state = self._clock(), self.done, self._state
        running_at, held_at, ended_at = self._running_at, self._held_at, self._ended_at
        elapsed_s = clock - self._began_at
        running_s = 0.0 if running_at is None else clock - running_at
        computed_per_s, output_per_s, rows_per_s = self._rates(clock, done, running_s)
        held_until = clock if ended_at is None else ended_at
        return ShardProgress(
            **self._constant,
            state=state,
            updated_at=self._now(),
            elapsed_s=elapsed_s,
            engine_start_s=elapsed_s - running_s,
            gpu_held_s=0.0 if held_at is None else held_until - held_at,
            num_parts_done=self._num_parts,
            done=done,
            computed_tokens_per_s=computed_per_s,
            output_tokens_per_s=output_per_s,
            eta_s=self._eta_s(state, done, running_s, rows_per_s),
            error=self._error,
        )

    def note(self) -> str:
        """Speed over the last minute and the saving so far, for a progress line."""
        clock, done = self._clock(), self.done
        running_s = 0.0 if self._running_at is None else clock - self._running_at
        computed_per_s, output_per_s, _ = self._rates(clock, done, running_s)
        saved = 100 * (done.saving_ratio or 0.0)
        return f"{token_speed(computed_per_s, output_per_s)}, {saved:.0f} % of prompt tokens saved"

    def _rates(self, clock: float, done: Counts, running_s: float) -> tuple[float, float, float]:
        """Computed prompt tokens, output tokens and rows per second, over the last minute or since
        the engine started."""
        recent = (counts for at, counts in self._window if clock - at < _WINDOW_S)
        before, span_s = next(recent, done), min(running_s, _WINDOW_S)
        if span_s <= 0:
            return 0.0, 0.0, 0.0
        return (
            (done.num_computed_tokens - before.num_computed_tokens) / span_s,
            (done.num_output_tokens - before.num_output_tokens) / span_s,
            (done.num_rows - before.num_rows) / span_s,
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
        num_rows = done.num_rows - self.num_rows_before
        if state != "running" or num_rows <= 0 or running_s <= 0:
            return None
        rows_per_s = (num_rows / running_s + recent_rows_per_s) / 2
        return max(0, self._shard.num_rows - done.num_rows) / rows_per_s


Observe = Callable[[ShardTally], AbstractContextManager[object]]
"""Called with an attempt's tally at its start; the context that it returns is left after the
attempt's last state. Any thread may call `ShardTally.snapshot` meanwhile."""
