"""Decides which shard a worker runs next, by what is in the lake (ADR 33)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchllm_operator.amounts import counted
from batchllm_operator.errors import FencedError
from batchllm_operator.run.pace import Pace
from batchllm_operator.run.shard_sight import ShardReader, Sight
from batchllm_operator.shards.attempts import (
    Attempt,
    Claim,
    attempt_numbers,
    claim_number,
    has_ended,
    read_claim,
)
from batchllm_operator.shards.progress import LIVE_STATES
from batchllm_operator.shards.report import ShardReport, require_report
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

_log = logging.getLogger(__name__)
_NUM_THREADS: Final = 32


class Claimed(NamedTuple):
    """A shard that this process has to run."""

    shard_idx: int
    attempt: Attempt


class WorkerReport(NamedTuple):
    """What a worker has done, and what is left of the plan."""

    worker: int
    num_workers: int
    num_shards: int
    num_finished: int
    """Finished shards of the plan, of all workers."""
    others: list[int]
    """Shards that other workers run."""
    shards: dict[int, ShardReport]
    """Those that it has finished, by shard_idx."""

    def to_result(self) -> dict[str, Any]:
        """For the command's result; counts are those of the shards that it has finished."""
        fields = self._asdict()
        reports = fields.pop("shards")
        counts = Counts.total(report.counts for report in reports.values()).model_dump()
        num_parts = sum(report.num_parts for report in reports.values())
        return {**fields, "shard_idxs": sorted(reports), "num_parts": num_parts, **counts}


class ShardQueue:
    """The shards of a plan, as one of several workers sees them.

    The order of shards is cut into as many runs as there are workers, of about equal predicted
    work. `take` claims, as long as there are any,

    1. the first shard of the worker's own run that isn't begun, or was left by its attempt,
    2. the last shard that isn't begun of the run with the most predicted work not begun,
    3. a shard that was left by its attempt: stopped, or without a sign of life,
    4. a shard whose attempt failed, each once.

    A slow worker claims no shard that the others, at their pace, will have finished with all that
    they run before it would: the job would wait for it.

    Args:
        worker: from 0 to `num_workers` - 1.
        owner: attempts with the same owner, as of the first look, are this task's earlier tries,
            and count as left.
        first: shards that go before all others, by the same rules.
        clock: monotonic seconds.
        now: the time by which progress of other hosts is judged old.

    Attributes:
        stands_back: whether shards were free at the last look that it leaves to faster workers.
    """

    def __init__(
        self,
        plan: StoredPlan,
        worker: int,
        num_workers: int,
        *,
        owner: str | None = None,
        first: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.worker, self.num_workers = worker, num_workers
        self._plan, self._owner, self._clock, self._now = plan, owner, clock, now
        self._first = set(first)
        self._work = predicted_work(plan)
        self._run_of = runs_of(self._work, num_workers)
        self._sights: dict[int, Sight] = {}
        self._finished: dict[int, Counts] = {}
        self._pace = Pace(clock)
        self.stands_back = False
        self._mine: set[int] = set()
        """Shards that this process runs, or has had to give up while it ran them."""
        self._has_failed: set[int] = set()
        """Shards that failed elsewhere, and were taken once."""
        self._reader = ShardReader(plan)
        self._is_first_look = True
        self._earlier_tries: dict[int, int] = {}
        """Attempts of the same owner from before this process, by shard. Later ones may be of the
        try that takes over from this one: to fence it back would never end."""

    @property
    def num_left(self) -> int:
        """Unfinished shards of all workers, as of the last look."""
        return len(self._work) - len(self._finished)

    def take(self) -> Claimed | None:
        """Claim the next shard; None if there is none now.

        Raises:
            PlanError: a report is of another version.
            StorageError: the lake can't be read or written.
        """
        while (shard_idx := self.next_shard()) is not None:
            sight = self._sights.get(shard_idx)
            if sight is not None and sight.state == "failed":
                self._has_failed.add(shard_idx)
            number = 1 if sight is None else sight.number + 1
            folder = self._plan.run_folder(shard_idx)
            attempt = claim_number(folder, number, self._owner, self.worker)
            if attempt is not None:
                self._mine.add(shard_idx)
                self._pace.claimed(shard_idx, len(self._finished))
                return Claimed(shard_idx, attempt)
        return None

    def next_shard(self) -> int | None:
        """The shard that `take` would claim; looks at the lake."""
        self._look()
        open_idxs = set(range(len(self._work))) - self._finished.keys() - self._mine
        first = open_idxs & self._first
        if first and (shard_idx := self._next_of(sorted(first))) is not None:
            return shard_idx
        return self._next_of(sorted(open_idxs - first))

    def _next_of(self, open_idxs: Sequence[int]) -> int | None:
        untouched = [idx for idx in open_idxs if idx not in self._sights]
        if self._leaves_to_others(len(untouched)):
            return None
        left = [idx for idx in open_idxs if idx in self._sights and self._is_left(idx)]
        failed = [idx for idx in left if self._sights[idx].state == "failed"]
        resumable = [idx for idx in left if idx not in failed]
        own = [idx for idx in (*untouched, *resumable) if self._run_of[idx] == self.worker]
        if own:
            return min(own)
        if untouched:
            work = np.bincount(
                self._run_of[untouched], self._work[untouched], minlength=self.num_workers
            )
            return max(idx for idx in untouched if self._run_of[idx] == int(np.argmax(work)))
        again = [idx for idx in failed if idx not in self._has_failed]
        return next(iter([*resumable, *again]), None)

    def _leaves_to_others(self, num_free: int) -> bool:
        """Whether it is too slow for one of the last shards; see `stands_back`."""
        stood_back = self.stands_back
        num_begun = len(self.others())
        self.stands_back = num_free > 0 and self._pace.is_behind(
            len(self._finished), num_free, num_begun
        )
        if self.stands_back and not stood_back:
            _log.info("this worker is slow: others run the last %s", counted(num_free, "shard"))
        return self.stands_back

    def own(self) -> list[int]:
        """Shards of this worker's own run that aren't finished."""
        own = np.flatnonzero(self._run_of == self.worker).tolist()
        return [shard_idx for shard_idx in own if shard_idx not in self._finished]

    def others(self) -> list[int]:
        """Unfinished shards that others run, as of the last look."""
        return sorted(idx for idx in self._elsewhere if not self._is_left(idx))

    @property
    def _elsewhere(self) -> set[int]:
        """Shards that were begun, aren't finished and don't run here."""
        return self._sights.keys() - self._finished.keys() - self._mine

    def elsewhere(self) -> dict[int, Counts]:
        """Finished work of the shards that don't run here, as of the last look."""
        return {**{idx: self._sights[idx].done for idx in self._elsewhere}, **self._finished}

    def report(self, shards: dict[int, ShardReport]) -> WorkerReport:
        """What is left of the plan, with the reports of `shards`."""
        done = len(self._finished), self.others(), shards
        return WorkerReport(self.worker, self.num_workers, len(self._work), *done)

    def reports(self) -> dict[int, ShardReport]:
        """Reports of finished shards, by shard_idx: the owner's, or without one all.

        Raises:
            IncompleteRunError, PlanError: a report has become unreadable.
        """
        idxs = sorted(self._finished)
        reports = ahead(idxs, self._own_report, num_threads=_NUM_THREADS)
        return {idx: report for idx, report in zip(idxs, reports, strict=True) if report}

    def _own_report(self, shard_idx: int) -> ShardReport | None:
        folder = self._plan.run_folder(shard_idx)
        if self._owner is not None:
            numbers = attempt_numbers(folder)
            if not numbers or not self._is_ours(read_claim(folder, numbers[-1])):
                return None
        return require_report(self._plan, shard_idx)

    def unsure_for_s(self) -> float:
        """Seconds until another `take` tells whether attempts without recent signs are lost."""
        now = self._clock()
        old = [self._sights[idx] for idx in self.others()]
        old = [sight for sight in old if sight.is_old(self._now())]
        return max((sight.watch_s - (now - sight.seen_at) for sight in old), default=0.0)

    def give_up(self, shard_idx: int, error: FencedError) -> None:
        """Note that a later attempt has taken over a shard."""
        _log.warning("shard %d is left to another worker: %s", shard_idx, error)
        self._mine.discard(shard_idx)

    def ended(self, shard_idx: int, counts: Counts) -> None:
        """Note that a shard is finished."""
        self._mine.discard(shard_idx)
        self._finished[shard_idx] = counts
        self._pace.ended(shard_idx)

    def _look(self) -> None:
        """Read the latest attempts of shards that may have changed."""
        idxs = sorted(set(self._plan.begun_shards()) - self._finished.keys() - self._mine)
        for idx, seen in zip(idxs, ahead(idxs, self._read, num_threads=_NUM_THREADS), strict=True):
            if isinstance(seen, Counts):
                self._finished[idx] = seen
            elif seen is not None:
                before = self._sights.get(idx)
                if before is None or before.sign != seen.sign:
                    self._sights[idx] = seen
                if self._is_first_look and self._is_ours(seen.claim):
                    self._earlier_tries[idx] = seen.number
        self._is_first_look = False

    def _read(self, shard_idx: int) -> Counts | Sight | None:
        # What was finished before this run may have been damaged. Each worker checks its own run's.
        is_checked = self._is_first_look and self._run_of[shard_idx] == self.worker
        return self._reader.read(shard_idx, self._clock(), is_checked=bool(is_checked))

    def _is_left(self, shard_idx: int) -> bool:
        """Whether nobody works on a shard that was begun.

        Clocks differ: what looks old, or is from the future, is watched for some intervals.
        """
        sight = self._sights[shard_idx]
        if sight.state is not None and sight.state not in LIVE_STATES:
            return True
        if self._earlier_tries.get(shard_idx) == sight.number:
            return True
        if sight.claim is not None and has_ended(sight.claim):
            return True
        return sight.is_old(self._now()) and self._clock() - sight.seen_at > sight.watch_s

    def _is_ours(self, claim: Claim | None) -> bool:
        """Whether it is of the same task: one of its earlier tries, or of their replicas."""
        if self._owner is None or claim is None or claim.owner is None:
            return False
        return claim.owner == self._owner or claim.owner.startswith(f"{self._owner}/")


def predicted_work(plan: StoredPlan) -> npt.NDArray[np.float64]:
    """Predicted GPU seconds of each shard, or its prefill tokens without an estimate."""
    shards = plan.manifest.shards
    if any(shard.predicted_gpu_s is None for shard in shards):
        return np.array([shard.num_prefill_tokens for shard in shards], dtype=np.float64)
    return np.array([shard.predicted_gpu_s for shard in shards], dtype=np.float64)


def runs_of(work: npt.NDArray[np.float64], num_workers: int) -> npt.NDArray[np.int64]:
    """The worker in whose run each shard is: int64 [num_shards], ascending.

    Runs are consecutive shards of about equal work: each shard is where its middle falls.

    Args:
        work: float64 [num_shards], >= 0.
    """
    weights = work if work.sum() > 0 else np.ones_like(work)
    ends = np.cumsum(weights)
    share = (ends - weights / 2) / (ends[-1] if len(ends) else 1.0)
    return np.minimum((share * num_workers).astype(np.int64), num_workers - 1)
