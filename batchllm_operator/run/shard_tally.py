"""Counts an attempt's work in memory, for observers."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Any, Final

from batchllm_operator.amounts import token_speed
from batchllm_operator.engine import EngineOutput
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PartEntry
from batchllm_operator.shards.progress import ShardProgress, State
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

DEFAULT_INTERVAL_S: Final = 5.0
_WINDOW_S: Final = 60.0
_STEP_S: Final = 1.0
"""Outputs within one second are one entry of the window."""


class ShardTally:
    """Counts an attempt's outputs; one thread counts, any may take a `snapshot`.

    Args:
        attempt: the attempt that begins now, at the shard `shard_idx` of the plan.
        entries: ledger entries of the parts that earlier attempts have finished.
        spilled: counts of outputs that they have finished of other parts.
        num_gpus: GPUs that the attempt holds.
        interval_s: seconds between two snapshots in the lake.
        worker: number of the worker that runs the attempt, of `num_workers`.
        clock: monotonic seconds.

    Attributes:
        num_rows_before: rows that earlier attempts have finished.
        kept: see `keep`.
    """

    def __init__(
        self,
        plan: StoredPlan,
        shard_idx: int,
        attempt: Attempt,
        entries: Collection[PartEntry],
        spilled: Iterable[Counts] = (),
        *,
        num_gpus: int,
        interval_s: float = DEFAULT_INTERVAL_S,
        worker: int = 0,
        num_workers: int = 1,
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
            "interval_s": interval_s,
            "worker": worker,
            "num_workers": num_workers,
            "num_gpus": num_gpus,
            "num_rows": self._shard.num_rows,
            "num_parts": self._shard.num_parts,
        }
        self._clock, self._now = clock, now
        self._done = self.kept = Counts.total([*entries, *spilled])
        self._num_parts, self.num_rows_before = len(entries), self.kept.num_rows
        self._window = _Window()
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
        counts = Counts.of([(output, num_rows)])
        self._done += counts
        self._window.add(
            self._clock(), counts.num_computed_tokens, counts.num_output_tokens, num_rows
        )

    def count_part(self) -> None:
        """Count a written part, whose outputs have been counted one by one."""
        self._num_parts += 1

    def keep(self, stored: Counts) -> None:
        """Note what is stored, by this attempt and by those before it: the rest may be lost."""
        self.kept = stored

    @property
    def num_failed_rows(self) -> int:
        """Rows that have failed so far, in all attempts."""
        return self._done.num_failed_rows

    def end(self, state: State, error: str | None = None) -> None:
        """Set the last state; unless it is `finished`, outputs that aren't stored are lost."""
        if state != "finished":
            self._done = self.kept
        self._error = error
        self._ended_at = self._clock()
        self._state = state

    def snapshot(self) -> ShardProgress:
        clock, done, state = self._clock(), self._done, self._state
        elapsed_s = clock - self._began_at
        running_at = self._running_at
        running_s = 0.0 if running_at is None else clock - running_at
        computed_per_s, output_per_s, rows_per_s = self._window.rates(clock, running_s)
        return ShardProgress(
            **self._constant,
            state=state,
            updated_at=self._now(),
            elapsed_s=elapsed_s,
            engine_start_s=elapsed_s if running_at is None else running_at - self._began_at,
            gpu_held_s=self._gpu_held_s(clock),
            num_parts_done=self._num_parts,
            done=done,
            computed_tokens_per_s=computed_per_s,
            output_tokens_per_s=output_per_s,
            eta_s=self._eta_s(state, done, running_s, rows_per_s),
            error=self._error,
        )

    def note(self) -> str:
        """Speed over the last minute and the saving so far, for a progress line."""
        clock, done = self._clock(), self._done
        running_s = 0.0 if self._running_at is None else clock - self._running_at
        computed_per_s, output_per_s, _ = self._window.rates(clock, running_s)
        saved = done.saving_ratio or 0.0
        speed = token_speed(computed_per_s, output_per_s)
        return f"{speed}, {100 * saved:.0f} % of prompt tokens saved"

    def _gpu_held_s(self, clock: float) -> float:
        held_at, ended_at = self._held_at, self._ended_at
        if held_at is None:
            return 0.0
        return (clock if ended_at is None else ended_at) - held_at

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


class _Window:
    """Computed prompt tokens, output tokens and rows of the last minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, list[int]]] = deque()
        """Start of each entry, and its counts in the order of `add`."""

    def add(self, clock: float, num_computed: int, num_output: int, num_rows: int) -> None:
        new = [num_computed, num_output, num_rows]
        with self._lock:
            if self._steps and clock - self._steps[-1][0] < _STEP_S:
                began_at, counts = self._steps[-1]
                new = [old + more for old, more in zip(counts, new, strict=True)]
                self._steps[-1] = (began_at, new)
            else:
                self._steps.append((clock, new))

    def rates(self, clock: float, running_s: float) -> tuple[float, float, float]:
        """The counts per second, over the window or since the engine started."""
        with self._lock:
            while self._steps and clock - self._steps[0][0] >= _WINDOW_S:
                self._steps.popleft()
            entries = [counts for _, counts in self._steps]
        span_s = min(running_s, _WINDOW_S)
        if not entries or span_s <= 0:
            return 0.0, 0.0, 0.0
        num_computed, num_output, num_rows = map(sum, zip(*entries, strict=True))
        return num_computed / span_s, num_output / span_s, num_rows / span_s
