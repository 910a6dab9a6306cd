"""The progress of an attempt: a small object in the lake, replaced every few seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field

from batchllm_operator.stored_plan.counts import Count, Counts, Seconds
from batchllm_operator.stored_plan.stored_json import StoredJson

PROGRESS_FILE: Final = "progress.json"
"""File name in an attempt's folder."""

State = Literal["starting", "running", "finished", "stopped", "failed"]

Worker = tuple[int, str]
"""Number and host: the number alone may be that of several processes."""

LIVE_STATES: Final[tuple[State, ...]] = ("starting", "running")
SILENT_AFTER_S: Final = 60.0
"""How long a live attempt gives no sign at most, at the usual interval."""
_SILENT_AFTER_INTERVALS: Final = 10
MOST_INTERVAL_S: Final = 60.0
"""Upper bound of intervals that count: otherwise a killed attempt could look live for hours."""


class ShardProgress(StoredJson):
    """Version 1 of an attempt's progress.json. For people, and for waiting tasks."""

    what = "progress"
    version_field = "progress_version"

    progress_version: Literal[1] = 1
    plan_id: str
    shard_idx: Count
    attempt: Count
    host: str
    state: State
    """`starting` until the engine takes requests; `stopped` by a signal, to be resumed."""
    started_at: AwareDatetime
    updated_at: AwareDatetime
    interval_s: Seconds = 5.0
    """Seconds between two updates by a live attempt."""
    elapsed_s: Seconds
    """Since `started_at`, by a monotonic clock, including the engine's start."""
    engine_start_s: Seconds = 0.0
    """The part of it until the engine took requests."""
    worker: Count
    """Number of the worker that runs the shard, from 0."""
    num_workers: Count
    """Number of workers that this one was started as one of."""
    num_gpus: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """GPUs that the attempt holds; 0 on a CPU."""
    gpu_held_s: Seconds
    """The part of `elapsed_s` that counts for this attempt's GPU time: a worker begins its next
    shard before the last one has ended, and its GPUs are counted once."""
    num_rows: Count
    num_parts: Count
    num_parts_done: Count
    """Written parts. Rows of other parts count as done once the engine has generated them."""
    done: Counts
    """Finished work, by this attempt and by those before it."""
    computed_tokens_per_s: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    """Prompt tokens that this attempt has computed per second over the last minute; without those
    that it found in the cache."""
    output_tokens_per_s: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    """Output tokens of this attempt per second, over the last minute."""
    eta_s: Seconds | None = None
    """Until the last row, as of `updated_at`; None while unknown."""
    error: str | None = None
    """First line of a failed attempt's error."""

    @property
    def maker(self) -> Worker:
        """The worker that makes the attempt."""
        return self.worker, self.host

    @property
    def gpu_s(self) -> float:
        """GPU seconds that count for the attempt, up to its last sign."""
        return self.gpu_held_s * self.num_gpus

    def age_s(self, now: datetime) -> float:
        """Seconds since it was written, at least 0, because clocks differ."""
        return max(0.0, (now - self.updated_at).total_seconds())

    @property
    def silent_after_s(self) -> float:
        """Upper bound of a live attempt's `age_s`: a minute, or ten intervals."""
        interval_s = min(self.interval_s, MOST_INTERVAL_S)
        return max(SILENT_AFTER_S, _SILENT_AFTER_INTERVALS * interval_s)

    def is_live(self, now: datetime) -> bool:
        """Whether the attempt seems to be at work.

        A killed process leaves its last state behind, but doesn't update it any more.
        """
        return self.state in LIVE_STATES and self.age_s(now) <= self.silent_after_s
