"""The status of a plan's run at one moment: its shards, its workers, and all of them together."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from batchllm_operator.shards.reports import Refusal
from batchllm_operator.stored_plan.bill import Bill
from batchllm_operator.stored_plan.counts import NOTHING, Counts

ShardState = Literal["waiting", "starting", "running", "silent", "stopped", "failed", "finished"]
"""`waiting`: no attempt has begun. `silent`: an attempt has stopped updating its progress, because
it was killed, or its release writes none. The others are those of `ShardProgress`."""

WorkerState = Literal["starting", "running", "silent", "stopped", "failed", "idle"]
"""`idle`: its last shard is finished; it waits or has ended. Otherwise that of its live shards, or
of its last one."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard, by its report or else by its latest attempt.

    Finished work is that of all attempts. Without progress it is 0 until the shard is finished,
    because the ledger isn't read for this.
    """

    shard_idx: int
    state: ShardState
    num_rows: int
    num_parts: int
    num_parts_done: int = 0
    done: Counts = NOTHING
    computed_tokens_per_s: float = 0.0
    """Prompt tokens computed per second, without cached ones; speeds are 0 unless it is live."""
    output_tokens_per_s: float = 0.0
    eta_s: float | None = None
    """Counted from `JobStatus.read_at`; None if unknown, or unless the shard is live."""
    predicted_gpu_s: float | None = None
    age_s: float | None = None
    """Seconds since the latest attempt's last sign; None if there is none."""
    num_attempts: int = 0
    gpu_s: float = 0.0
    host: str = ""
    """This and the rest are of the latest attempt; none before it has given a sign."""
    worker: int | None = None
    error: str | None = None

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "running")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker, by the attempts that it made.

    Workers are told apart by number and host. The number alone may be that of several processes:
    tries of one task, or runs of the plan with other numbers of workers.
    """

    worker: int
    host: str
    num_workers: int
    """Number of workers that it was last started as one of."""
    state: WorkerState
    live_shards: tuple[int, ...]
    """Numbers of the shards that it runs, ascending. It feeds one before the last has ended."""
    num_finished: int
    num_rows_done: int
    """Finished rows of the shards whose latest attempt it made, with those of earlier attempts."""
    computed_tokens_per_s: float
    """As of a shard; 0 unless it is live."""
    output_tokens_per_s: float
    age_s: float
    gpu_s: float
    """Held by all its attempts."""

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "running")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """All shards of a plan, at one moment.

    Rows that can't be prompted or reuse an earlier output aren't counted, unless a name says so.
    """

    plan_uri: str
    plan_id: str
    job: str
    ds: str
    is_committed: bool
    read_at: datetime
    shards: tuple[ShardStatus, ...]
    bill: Bill
    """GPU time so far, None without a GPU, and the plan's prediction if it has one."""
    notes: tuple[str, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    """By number, and among equal numbers the latest sign first."""
    num_rejected_rows: int = 0
    """Rows that can't be prompted: failed rows, too, for commit and its limit."""
    planned_saving_ratio: float | None = None
    """What the plan says `done.saving_ratio` will be; None if there is nothing to generate."""
    round: int = 1
    """Of `num_rounds`: the plan's, from 1."""
    num_rounds: int = 1
    unit: str = "row"
    """What is counted as rows; see `JobSpec.unit`."""
    refusal: Refusal | None = None
    """Why the last commit published nothing; None if it hasn't refused, or after a commit."""

    @property
    def num_live_workers(self) -> int:
        return sum(worker.is_live for worker in self.workers)

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def done(self) -> Counts:
        return Counts.total(shard.done for shard in self.shards)

    @property
    def computed_tokens_per_s(self) -> float:
        return sum(shard.computed_tokens_per_s for shard in self.shards)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(shard.output_tokens_per_s for shard in self.shards)

    @property
    def gpu_s(self) -> float:
        return sum(shard.gpu_s for shard in self.shards)

    @property
    def num_finished(self) -> int:
        return sum(shard.state == "finished" for shard in self.shards)

    @property
    def is_finished(self) -> bool:
        return self.num_finished == len(self.shards)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last row of all shards, 0 if all are finished.

        The longest of the live shards' times, and at least the time for all remaining rows at the
        live shards' combined speed: as many shards run until the end, and no engine starts. None if
        no live shard has an estimate.
        """
        if self.is_finished:
            return 0.0
        # The rest as of the last sign takes its time from then on, not from now.
        latest_s = rows_per_s = num_since = 0.0
        for shard in self.shards:
            if shard.is_live and shard.eta_s is not None:
                age_s = shard.age_s or 0.0
                rest_s = shard.eta_s + age_s
                speed = (shard.num_rows - shard.done.num_rows) / rest_s if rest_s else 0.0
                latest_s, rows_per_s = max(latest_s, shard.eta_s), rows_per_s + speed
                num_since += speed * age_s
        num_left = self.num_rows - self.done.num_rows - num_since
        return max(latest_s, num_left / rows_per_s) if rows_per_s > 0 else None
