"""Reports of shards, of workers and of commits.

A shard's report and its ledger together prove that the shard is finished. A commit notes in the
plan's folder that it has published, or why it hasn't.
"""

import logging
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import AwareDatetime

from batchllm_operator.errors import MissingLibraryError, PlanError, SpecError
from batchllm_operator.lake import open_table
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.stored_plan.counts import Count, Counts
from batchllm_operator.stored_plan.run_report import ErrorKind
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher

REPORT_FILE: Final = "report.json"
"""In a shard's run folder."""
COMMITTED_FILE: Final = "committed.json"
REFUSED_FILE: Final = "refused.json"
_log = logging.getLogger(__name__)


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
    def of(cls, plan: StoredPlan, shard_idx: int, shard: ShardParts, num_resumed: int) -> Self:
        """The report of a shard that has all parts, of which earlier attempts wrote some."""
        return cls(
            plan_id=plan.manifest.plan_id,
            shard_idx=shard_idx,
            num_parts=len(shard.entries),
            num_resumed_parts=num_resumed,
            counts=shard.counts,
        )


def read_report(plan: StoredPlan, shard_idx: int) -> ShardReport | None:
    """The report of a shard; None if there is none yet.

    Raises `PlanError`: see `StoredJson.read`.
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


class Committed(StoredJson):
    """Version 1 of committed.json: nothing is left to do. Committing again writes the same bytes.

    The parts may be removed then; a cleared task must neither miss nor regenerate them.
    """

    what = "note of a commit"
    version_field = "committed_version"
    cure = "commit again"

    committed_version: Literal[1] = 1
    plan_id: str
    shards: tuple[ShardReport, ...]
    """All parts count as resumed, as they were finished earlier."""
    reuse_sha256: str | None = None
    """Digest of the index of reusable outputs, if the spec asks for one."""


class Refusal(StoredJson):
    """Version 1 of refused.json: why the last commit published nothing, for pages and `status`.

    A later commit replaces it, or succeeds: then it doesn't count.
    """

    what = "refusal"
    version_field = "refused_version"

    refused_version: Literal[1] = 1
    plan_id: str
    refused_at: AwareDatetime
    reason: str
    """The commit's error, without credentials."""
    num_failed_rows: Count = 0
    errors: tuple[ErrorKind, ...] = ()
    """The failed rows' most frequent kinds, if it was for these that the commit was refused."""


def find_committed(plan: StoredPlan) -> Committed | None:
    """The note, if there is one and the output table still holds the plan's rows.

    The note alone doesn't prove it: a later plan may have replaced the rows, or a user dropped them
    to generate them again. An unreadable note doesn't count. Raises `TableError`: the output
    partition holds what another job or program wrote.
    """
    manifest = plan.manifest
    try:
        committed = Committed.read(plan.folder, COMMITTED_FILE, plan_id=manifest.plan_id)
    except PlanError as error:
        _log.warning("%s; it doesn't count", error)
        return None
    if committed is None or len(committed.shards) != len(manifest.shards):
        return None
    spec = manifest.spec
    try:
        table = open_table(spec.output.uri, spec.input.partition_column)
    except (MissingLibraryError, SpecError) as error:
        # Images for GPUs lack the tables' libraries; the worker has checked before.
        _log.info("Whether the plan is committed can't be seen from here: %s", error)
        return None
    return committed if check_publisher(table, spec, manifest.ds) == plan.publication else None
