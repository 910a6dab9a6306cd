"""The report of a shard, which together with its ledger proves that the shard is finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from batchllm_operator.errors import DamagedFileError, IncompleteRunError
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


def require_report(plan: StoredPlan, shard_idx: int) -> ShardReport:
    """The report of a shard that should be finished.

    Raises:
        IncompleteRunError: there is none, or it is damaged.
        PlanError: it is of another version, or belongs elsewhere.
    """
    try:
        report = read_report(plan, shard_idx)
    except DamagedFileError as error:
        raise IncompleteRunError(str(error)) from error
    if report is None:
        raise IncompleteRunError(
            f"shard {shard_idx} of plan {plan.folder.uri}: there is no report; run the shard"
        )
    return report
