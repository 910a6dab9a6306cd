"""What a worker sees of a shard in the lake."""

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from batchllm_operator.errors import DamagedFileError, PlanError
from batchllm_operator.shards.attempts import (
    LIVE_STATES,
    MOST_INTERVAL_S,
    SILENT_AFTER_S,
    Claim,
    ShardProgress,
    attempt_numbers,
    read_claim,
    read_progress,
)
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.shards.reports import REPORT_FILE, ShardReport, read_report
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)
_WATCHED_INTERVALS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The latest attempt at an unfinished shard, as it was seen."""

    number: int
    claim: Claim | None
    progress: ShardProgress | None
    seen_at: float
    """When it was first seen like this: seconds of the queue's clock."""

    @property
    def state(self) -> str | None:
        return None if self.progress is None else self.progress.state

    @property
    def sign(self) -> tuple[object, ...]:
        """What changes while the attempt works."""
        return self.number, self.progress and self.progress.updated_at, self.state

    def is_old(self, now: datetime) -> bool:
        """Whether the last sign isn't of the last minute by this host's clock, or there is none."""
        if self.progress is None:
            return True
        age_s = abs((now - self.progress.updated_at).total_seconds())
        return age_s > self.progress.silent_after_s

    @property
    def watch_s(self) -> float:
        """How long a sign must not change until its attempt counts as lost."""
        if self.progress is None:
            return SILENT_AFTER_S
        return _WATCHED_INTERVALS * min(self.progress.interval_s, MOST_INTERVAL_S)


def look_at(
    plan: StoredPlan, shard_idx: int, seen_at: float, damaged: set[int], *, is_checked: bool
) -> ShardReport | Sight | None:
    """The report of a finished shard, or its latest attempt; None without an attempt.

    Args:
        damaged: shards with a report that can't be read, or whose parts it doesn't count. They
            aren't finished; the shard is added if it is one.
        is_checked: whether to check the parts of a finished shard.

    Raises `PlanError`: the report or a ledger entry is of another version.
    """
    folder = plan.run_folder(shard_idx)
    number = max(attempt_numbers(folder), default=0)
    try:
        progress = read_progress(folder, number) if number else None
    except PlanError as error:
        _log.warning("%s", error)
        progress = None
    is_at_work = progress is not None and progress.state in LIVE_STATES
    report = None if is_at_work else _report(plan, shard_idx, damaged, is_checked)
    if report is not None:
        return report
    return Sight(number, read_claim(folder, number), progress, seen_at) if number else None


def _report(
    plan: StoredPlan, shard_idx: int, damaged: set[int], is_checked: bool
) -> ShardReport | None:
    if shard_idx in damaged:
        return None
    try:
        report = read_report(plan, shard_idx)
    except DamagedFileError as error:
        _log.warning("%s", error)
        damaged.add(shard_idx)
        return None
    if report is None or not is_checked:
        return report
    stored, counts = ShardParts.read(plan, shard_idx), report.counts
    found = stored.counts
    if (found.num_requests, found.num_rows) == (counts.num_requests, counts.num_rows):
        return report
    name = f"{stored.folder.uri}/{REPORT_FILE}"
    _log.warning("%s doesn't count: the ledger says otherwise", name)
    damaged.add(shard_idx)
    return None
