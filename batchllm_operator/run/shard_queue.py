"""Decides which shard a worker runs next, by what is in the lake (ADR 33)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.amounts import counted
from batchllm_operator.errors import FencedError, IncompleteRunError, PlanError
from batchllm_operator.run.pace import Pace
from batchllm_operator.run.shard_source import Claimed, RowsDone
from batchllm_operator.shards.attempts import (
    Claim,
    attempt_numbers,
    claim_number,
    has_ended,
    read_claim,
    read_progress,
)
from batchllm_operator.shards.parts import read_ledger
from batchllm_operator.shards.progress import (
    LIVE_STATES,
    MOST_INTERVAL_S,
    ShardProgress,
)
from batchllm_operator.shards.report import REPORT_FILE, ShardReport, require_report
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

_log = logging.getLogger(__name__)
_NUM_THREADS: Final = 32
_SILENT_AFTER_S: Final = 60.0
"""For a claim without progress, by this host's clock alone."""
_WATCHED_INTERVALS: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Sight:
    """The latest attempt at a shard, as it was seen."""

    number: int
    claim: Claim | None
    progress: ShardProgress | None
    is_finished: bool
    done: RowsDone
    """Of all attempts, by the report or the latest progress."""
    seen_at: float
    """When it was first seen like this: seconds of the queue's clock."""

    @property
    def sign(self) -> tuple[int, datetime | None, str]:
        """What changes while the attempt works."""
        progress = self.progress
        if progress is None:
            return self.number, None, ""
        return self.number, progress.updated_at, progress.state


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
        self._sights: dict[int, _Sight] = {}
        self._finished: dict[int, RowsDone] = {}
        self._pace = Pace(clock)
        self.stands_back = False
        self._mine: set[int] = set()
        """Shards that this process runs, or has had to give up while it ran them."""
        self._has_failed: set[int] = set()
        """Shards that failed elsewhere, and were taken once."""
        self._damaged: set[int] = set()
        """Shards with a report that can't be read, or whose parts it doesn't count."""
        self._is_first_look = True
        self._earlier_tries: dict[int, int] = {}
        """Attempts of the same owner from before this process, by shard. Later ones may be of the
        try that takes over from this one: to fence it back would never end."""

    @property
    def num_shards(self) -> int:
        return len(self._work)

    @property
    def num_finished(self) -> int:
        """Finished shards, as of the last look."""
        return len(self._finished)

    def take(self) -> Claimed | None:
        """Claim the next shard.

        Raises:
            StorageError: the lake can't be read or written.
        """
        while (shard_idx := self.next_shard()) is not None:
            sight = self._sights.get(shard_idx)
            if sight is not None and _state(sight) == "failed":
                self._has_failed.add(shard_idx)
            number = 1 if sight is None else sight.number + 1
            folder = self._plan.run_folder(shard_idx)
            attempt = claim_number(folder, number, self._owner, self.worker)
            if attempt is not None:
                self._mine.add(shard_idx)
                self._pace.claimed(shard_idx, self.num_finished)
                return Claimed(shard_idx, attempt)
        return None

    def next_shard(self) -> int | None:
        """The shard that `take` would claim; looks at the lake."""
        self._look()
        open_idxs = set(range(self.num_shards)) - self._finished.keys() - self._mine
        first = self._next_of(sorted(open_idxs & self._first))
        return first if first is not None else self._next_of(sorted(open_idxs - self._first))

    def _next_of(self, open_idxs: Sequence[int]) -> int | None:
        untouched = [idx for idx in open_idxs if idx not in self._sights]
        left = [idx for idx in open_idxs if idx in self._sights and self._is_left(idx)]
        stood_back, num_left = self.stands_back, len(untouched)
        self.stands_back = num_left > 0 and self._pace.is_behind(
            self.num_finished, num_left, len(self.others())
        )
        if self.stands_back:
            if not stood_back:
                _log.info("this worker is slow: others run the last %s", counted(num_left, "shard"))
            return None
        failed = {idx for idx in left if _state(self._sights[idx]) == "failed"}
        own = [
            idx
            for idx in (*untouched, *left)
            if self._run_of[idx] == self.worker and idx not in failed
        ]
        if own:
            return min(own)
        if untouched:
            work = np.bincount(
                self._run_of[untouched], self._work[untouched], minlength=self.num_workers
            )
            return max(idx for idx in untouched if self._run_of[idx] == int(np.argmax(work)))
        resumable = [idx for idx in left if idx not in failed]
        return next(iter([*resumable, *sorted(failed - self._has_failed)]), None)

    def own(self) -> list[int]:
        """Shards of this worker's own run that aren't finished."""
        own = np.flatnonzero(self._run_of == self.worker).tolist()
        return [shard_idx for shard_idx in own if shard_idx not in self._finished]

    def others(self) -> list[int]:
        """Unfinished shards that others run, as of the last look."""
        unfinished = self._sights.keys() - self._finished.keys() - self._mine
        return sorted(idx for idx in unfinished if not self._is_left(idx))

    def num_left(self) -> int:
        return self.num_shards - self.num_finished

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self._plan.manifest.shards)

    def elsewhere(self) -> dict[int, RowsDone]:
        begun = self._sights.keys() - self._finished.keys() - self._mine
        return {**{idx: self._sights[idx].done for idx in begun}, **self._finished}

    def reports(self) -> dict[int, ShardReport]:
        """Reports of finished shards, by shard_idx: the owner's, or without one all.

        Raises:
            IncompleteRunError, PlanError: a report has become unreadable.
        """
        idxs = sorted(self._finished)
        found = ahead(idxs, self._own_report, num_threads=_NUM_THREADS)
        return {idx: each for idx, each in zip(idxs, found, strict=True) if each is not None}

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
        old = (self._sights[idx] for idx in self.others())
        return max((_watch_s(s) - (now - s.seen_at) for s in old if self._is_old(s)), default=0.0)

    def give_up(self, shard_idx: int, error: FencedError) -> None:
        _log.warning("shard %d is left to another worker: %s", shard_idx, error)
        self._mine.discard(shard_idx)

    def ended(self, shard_idx: int, num_failed: int) -> None:
        self._mine.discard(shard_idx)
        self._finished[shard_idx] = RowsDone(self._plan.shard(shard_idx).num_rows, num_failed)
        self._pace.ended(shard_idx)

    def _look(self) -> None:
        """Read the latest attempts of shards that may have changed."""
        idxs = sorted(set(self._plan.begun_shards()) - self._finished.keys() - self._mine)
        for idx, sight in zip(idxs, ahead(idxs, self._read, num_threads=_NUM_THREADS), strict=True):
            if sight is None:  # a folder without an attempt
                continue
            if sight.is_finished:
                self._finished[idx] = sight.done
                continue
            before = self._sights.get(idx)
            if before is None or before.sign != sight.sign:
                self._sights[idx] = sight
            if self._is_first_look and self._is_ours(sight.claim):
                self._earlier_tries[idx] = sight.number
        self._is_first_look = False

    def _read(self, shard_idx: int) -> _Sight | None:
        folder = self._plan.run_folder(shard_idx)
        numbers = attempt_numbers(folder)
        number = numbers[-1] if numbers else 0
        try:
            progress = read_progress(folder, number) if number else None
        except PlanError as error:
            _log.warning("%s", error)
            progress = None
        is_at_work = progress is not None and progress.state in LIVE_STATES
        is_finished = not is_at_work and folder.exists(REPORT_FILE)
        # What was finished before this run may have been damaged; each worker checks its own.
        is_checked = self._is_first_look and self._run_of[shard_idx] == self.worker
        if is_finished and is_checked and not self._is_whole(shard_idx):
            self._damaged.add(shard_idx)
        is_finished &= shard_idx not in self._damaged
        if not number and not is_finished:
            return None
        claim = read_claim(folder, number) if not is_finished else None
        done = self._done(shard_idx, progress, is_finished)
        return _Sight(number, claim, progress, is_finished, done, self._clock())

    def _is_whole(self, shard_idx: int) -> bool:
        """Whether the ledger has all parts of a shard, and its report counts them."""
        try:
            report = require_report(self._plan, shard_idx)
        except IncompleteRunError as error:
            _log.warning("%s", error)
            return False
        folder, plan_id = self._plan.run_folder(shard_idx), self._plan.manifest.plan_id
        entries = read_ledger(folder, plan_id)
        if len(entries) < self._plan.shard(shard_idx).num_parts:
            return False
        counts = Counts.total(entries.values())
        names = ("num_requests", "num_rows")
        if all(getattr(report.counts, name) == getattr(counts, name) for name in names):
            return True
        _log.warning("%s/%s doesn't count: the ledger says otherwise", folder.uri, REPORT_FILE)
        return False

    def _done(self, shard_idx: int, progress: ShardProgress | None, is_finished: bool) -> RowsDone:
        """Finished rows of a shard; the report is read only if the progress doesn't say it all."""
        if is_finished and (progress is None or progress.state != "finished"):
            try:
                report = require_report(self._plan, shard_idx)
                return RowsDone(report.counts.num_rows, report.counts.num_failed_rows)
            except (IncompleteRunError, PlanError) as error:
                _log.warning("%s", error)
        if progress is None:
            return RowsDone(0, 0)
        return RowsDone(progress.done.num_rows, progress.done.num_failed_rows)

    def _is_left(self, shard_idx: int) -> bool:
        """Whether nobody works on a shard that was begun.

        Clocks differ: what looks old, or is from the future, is watched for some intervals.
        """
        sight = self._sights[shard_idx]
        progress = sight.progress
        if progress is not None and progress.state not in LIVE_STATES:
            return True
        if self._earlier_tries.get(shard_idx) == sight.number:
            return True
        if sight.claim is not None and has_ended(sight.claim):
            return True
        watched_s = self._clock() - sight.seen_at
        return self._is_old(sight) and watched_s > _watch_s(sight)

    def _is_old(self, sight: _Sight) -> bool:
        """Whether the last sign isn't of the last minute by this host's clock, or there is none."""
        progress = sight.progress
        if progress is None:
            return True
        return abs((self._now() - progress.updated_at).total_seconds()) > progress.silent_after_s

    def _is_ours(self, claim: Claim | None) -> bool:
        """Whether it is of the same task: one of its earlier tries, or of their replicas."""
        if self._owner is None or claim is None or claim.owner is None:
            return False
        return claim.owner == self._owner or claim.owner.startswith(f"{self._owner}/")


def _watch_s(sight: _Sight) -> float:
    """How long a sign must not change until its attempt counts as lost."""
    if sight.progress is None:
        return _SILENT_AFTER_S
    return _WATCHED_INTERVALS * min(sight.progress.interval_s, MOST_INTERVAL_S)


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


def _state(sight: _Sight) -> str | None:
    return None if sight.progress is None else sight.progress.state
