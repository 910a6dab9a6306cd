"""Reports of a shard, which with its ledger proves that it is finished, and of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from batchllm_operator.shards.parts import PartEntry
from batchllm_operator.stored_plan.counts import Count, Counts
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan

REPORT_FILE: Final = "report.json"


class ShardReport(StoredJson):
    """A finished shard."""

    what = "shard report"
    version_field = "report_version"
    cure = "run the shard again"

    report_version: Literal[1] = 1
    plan_id: str
    shard_idx: Count
    num_parts: Count
    num_resumed_parts: Count
    """Parts that earlier attempts had finished."""
    counts: Counts
    """Over all attempts."""

    @classmethod
    def of_parts(
        cls, plan_id: str, shard_idx: int, entries: Sequence[PartEntry], num_resumed_parts: int
    ) -> ShardReport:
        """Add up the ledger entries of a finished shard."""
        return cls(
            plan_id=plan_id,
            shard_idx=shard_idx,
            num_parts=len(entries),
            num_resumed_parts=num_resumed_parts,
            counts=Counts.total(entries),
        )


def read_report(plan: StoredPlan, shard_idx: int) -> ShardReport | None:
    """The report of a shard; None if there is none yet.

    Raises:
        PlanError: see `StoredJson.read`.
    """
    folder, plan_id = plan.run_folder(shard_idx), plan.manifest.plan_id
    return ShardReport.read(folder, REPORT_FILE, plan_id=plan_id, shard_idx=shard_idx)


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
