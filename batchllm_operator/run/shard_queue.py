"""Decides which shard a worker runs next, by what is in the lake (ADR 33)."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batchllm_operator.amounts import counted
from batchllm_operator.run.shard_sight import Sight, look_at
from batchllm_operator.shards.attempts import (
    LIVE_STATES,
    Attempt,
    Claim,
    attempt_numbers,
    claim_number,
    has_ended,
    read_claim,
)
from batchllm_operator.shards.reports import ShardReport, WorkerReport
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

_log = logging.getLogger(__name__)
_NUM_THREADS: Final = 32
_MARGIN: Final = 1.5
"""At least 1. More, as a worker's next shard may take less time than its last."""


class Claimed(NamedTuple):
    """A shard that this process has to run."""

    shard_idx: int
    attempt: Attempt


class _Begun(NamedTuple):
    """When this process claimed a shard, and how many shards others had finished then."""

    at: float
    num_by_others: int


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
        owner: attempts with the same owner, as of the first look, are this task's earlier tries,
            and count as left.
        first: shards that go before all others, by the same rules.
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
        self.worker, self.num_workers, self.stands_back = worker, num_workers, False
        self._plan, self._owner, self._clock, self._now = plan, owner, clock, now
        self._first = set(first)
        seconds = [shard.predicted_gpu_s for shard in plan.manifest.shards]
        tokens = [shard.num_prefill_tokens for shard in plan.manifest.shards]
        self._work = np.array(tokens if None in seconds else seconds, dtype=np.float64)
        """Predicted GPU seconds of each shard, or its prefill tokens without an estimate."""
        self._run_of = runs_of(self._work, num_workers)
        self._sights: dict[int, Sight] = {}
        self._finished: dict[int, ShardReport] = {}
        self._damaged: set[int] = set()
        self._mine: dict[int, _Begun] = {}
        self._last: tuple[_Begun, float] | None = None
        """Its shard that was finished last, with the seconds from its claim to its end."""
        self._num_ended = 0  # by this process
        self._has_failed: set[int] = set()
        """Shards that failed elsewhere, and were taken once."""
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

        Raises `PlanError`: a report or a ledger entry is of another version.
        """
        while (shard_idx := self.next_shard()) is not None:
            sight = self._sights.get(shard_idx)
            if sight is not None and sight.state == "failed":
                self._has_failed.add(shard_idx)
            number = 1 if sight is None else sight.number + 1
            folder = self._plan.run_folder(shard_idx)
            attempt = claim_number(folder, number, self._owner, self.worker)
            if attempt is not None:
                num_by_others = len(self._finished) - self._num_ended
                self._mine[shard_idx] = _Begun(self._clock(), num_by_others)
                return Claimed(shard_idx, attempt)
        return None

    def next_shard(self) -> int | None:
        """The shard that `take` would claim; looks at the lake."""
        self.look()
        open_idxs = set(range(len(self._work))) - self._finished.keys() - self._mine.keys()
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
        """Whether others will finish all shards before this worker would finish one more.

        They go on as since the claim of the shard that it finished last.
        """
        stood_back, num_begun = self.stands_back, len(self.others())
        self.stands_back = False
        if self._last is not None and num_free and num_begun:
            claim, took_s = self._last
            num_meanwhile = len(self._finished) - self._num_ended - claim.num_by_others
            rest = (num_free + _MARGIN * num_begun) * (self._clock() - claim.at)
            self.stands_back = num_meanwhile * took_s > rest
        if self.stands_back and not stood_back:
            _log.info("this worker is slow: others run the last %s", counted(num_free, "shard"))
        return self.stands_back

    def own(self) -> list[int]:
        """Shards of this worker's own run that aren't finished."""
        own = np.flatnonzero(self._run_of == self.worker).tolist()
        return [shard_idx for shard_idx in own if shard_idx not in self._finished]

    def others(self) -> list[int]:
        """Unfinished shards that others run, as of the last look."""
        begun = self._sights.keys() - self._finished.keys() - self._mine.keys()
        return sorted(idx for idx in begun if not self._is_left(idx))

    def elsewhere(self) -> dict[int, Counts]:
        """Finished work of the shards that don't run here, as of the last look."""
        latest = {idx: sight.progress for idx, sight in self._sights.items()}
        done = {idx: progress.done for idx, progress in latest.items() if progress is not None}
        done |= {idx: report.counts for idx, report in self._finished.items()}
        return {idx: counts for idx, counts in done.items() if idx not in self._mine}

    def report(self, shards: dict[int, ShardReport]) -> WorkerReport:
        """What is left of the plan, with the reports of `shards`."""
        done = len(self._finished), self.others(), shards
        return WorkerReport(self.worker, self.num_workers, len(self._work), *done)

    def reports(self) -> dict[int, ShardReport]:
        """Reports of finished shards, by shard_idx: the owner's, or without one all."""
        idxs = sorted(self._finished)
        is_ours = ahead(idxs, self._is_by_owner, num_threads=_NUM_THREADS)
        return {i: self._finished[i] for i, ours in zip(idxs, is_ours, strict=True) if ours}

    def _is_by_owner(self, shard_idx: int) -> bool:
        if self._owner is None:
            return True
        folder = self._plan.run_folder(shard_idx)
        number = max(attempt_numbers(folder), default=0)
        return self._is_ours(read_claim(folder, number))

    def unsure_for_s(self) -> float:
        """Seconds until another `take` tells whether attempts without recent signs are lost."""
        now = self._clock()
        old = [self._sights[idx] for idx in self.others()]
        old = [sight for sight in old if sight.is_old(self._now())]
        return max((sight.watch_s - (now - sight.seen_at) for sight in old), default=0.0)

    def give_up(self, shard_idx: int) -> None:
        del self._mine[shard_idx]

    def ended(self, report: ShardReport) -> None:
        claim = self._mine.pop(report.shard_idx)
        self._finished[report.shard_idx] = report
        self._last = claim, self._clock() - claim.at
        self._num_ended += 1

    def look(self) -> None:
        """Read the latest attempts of shards that may have changed."""
        idxs = sorted(set(self._plan.begun_shards()) - self._finished.keys() - self._mine.keys())
        for idx, seen in zip(idxs, ahead(idxs, self._read, num_threads=_NUM_THREADS), strict=True):
            if isinstance(seen, ShardReport):
                self._finished[idx] = seen
            elif seen is not None:
                before = self._sights.get(idx)
                if before is None or before.sign != seen.sign:
                    self._sights[idx] = seen
                if self._is_first_look and self._is_ours(seen.claim):
                    self._earlier_tries[idx] = seen.number
        self._is_first_look = False

    def _read(self, shard_idx: int) -> ShardReport | Sight | None:
        # What was finished before this run may have been damaged. Each worker checks its own run's.
        is_checked = self._is_first_look and self._run_of[shard_idx] == self.worker
        seen_at, is_checked = self._clock(), bool(is_checked)
        return look_at(self._plan, shard_idx, seen_at, self._damaged, is_checked=is_checked)

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


def runs_of(work: npt.NDArray[np.float64], num_workers: int) -> npt.NDArray[np.int64]:
    """The worker in whose run each shard is: int64 [num_shards], ascending.

    Runs are consecutive shards of about equal `work`, float64 [num_shards], >= 0: each shard is
    where its middle falls.
    """
    weights = work if work.sum() > 0 else np.ones_like(work)
    ends = np.cumsum(weights)
    share = (ends - weights / 2) / (ends[-1] if len(ends) else 1.0)
    return np.minimum((share * num_workers).astype(np.int64), num_workers - 1)
