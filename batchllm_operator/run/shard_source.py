"""What a worker claims, and its report."""

from __future__ import annotations

from typing import Any, NamedTuple

from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.report import ShardReport
from batchllm_operator.stored_plan.counts import Counts


class Claimed(NamedTuple):
    """A shard that this process has to run."""

    shard_idx: int
    attempt: Attempt


class RowsDone(NamedTuple):
    """Finished rows."""

    num_rows: int
    num_failed: int
    """Those of them with an error."""


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
