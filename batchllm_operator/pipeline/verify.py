"""Whether a stage's results are in the lake, whole: what says that its task has succeeded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.lake import Folder
from batchllm_operator.pipeline.parts import read_ledger
from batchllm_operator.pipeline.run import REPORT_FILE, ShardReport
from batchllm_operator.pipeline.stored_plan import StoredPlan, job_folder
from batchllm_operator.spec import JobSpec

_RECORDS: Final = "records"
_RECORD_VERSION: Final = 1


def verify_shard(plan_uri: str, shard_idx: int) -> ShardReport:
    """Check that all of a finished shard is there, and report what the ledger says of it.

    There has to be a report of this plan, every part has to be in the ledger with a file
    whose checksum holds, and both have to count the same requests and rows. Only reads.

    Raises:
        PlanError: the plan or the shard is absent or of another version, or the report is of
            another plan or version.
        IncompleteRunError: the report or a part isn't there, or they contradict each other.
    """
    plan = StoredPlan.open(plan_uri)
    manifest = plan.manifest
    if len(manifest.shards) <= shard_idx < manifest.spec.planner.num_shards:
        return ShardReport.of(manifest.plan_id, shard_idx, [], 0)  # as `run_shard` has it
    shard = plan.shard(shard_idx)
    folder = plan.run_folder(shard_idx)
    where = f"shard {shard_idx} of plan {plan.folder.uri}"
    report = _read_report(folder, where)
    if (report.plan_id, report.shard_idx) != (manifest.plan_id, shard_idx):
        raise PlanError(f"{where}: its report is that of another plan or shard")
    entries = read_ledger(folder, manifest.plan_id)
    missing = [part_idx for part_idx in range(shard.num_parts) if part_idx not in entries]
    if missing:
        raise IncompleteRunError(
            f"{where}: there is a report, but {len(missing)} of {shard.num_parts} parts are"
            f" missing or altered, the first is part {missing[0]}; run the shard again"
        )
    found = ShardReport.of(
        manifest.plan_id, shard_idx, list(entries.values()), report.num_resumed_parts
    )
    if (found.num_requests, found.num_rows) != (report.num_requests, report.num_rows):
        raise IncompleteRunError(
            f"{where}: the report doesn't say what the ledger says; run the shard again"
        )
    return found


def _read_report(folder: Folder, where: str) -> ShardReport:
    try:
        fields = json.loads(folder.read_bytes(REPORT_FILE))
    except FileNotFoundError:
        raise IncompleteRunError(f"{where}: there is no report; run the shard") from None
    except ValueError as error:
        raise IncompleteRunError(f"{where}: the report isn't JSON; run the shard again") from error
    version = fields.get("report_version") if isinstance(fields, dict) else None
    if version != 1:
        raise PlanError(
            f"{where}: the report is of version {version!r}, this release reads version 1; use"
            " one release of batchllm-operator everywhere"
        )
    try:
        return ShardReport.model_validate(fields)
    except ValidationError as error:
        raise IncompleteRunError(f"{where}: the report isn't whole; run the shard again") from error


def record_plan(spec: JobSpec, ds: str, name: str, result: Mapping[str, Any]) -> None:
    """Keep under `name` what planning gave, for who asked for it and can't see the process."""
    body = {"record_version": _RECORD_VERSION, "result": dict(result)}
    _records(spec, ds).write_bytes(f"{name}.json", json.dumps(body, indent=1).encode())


def verify_plan(spec: JobSpec, ds: str, name: str) -> dict[str, Any]:
    """The result that `record_plan` kept, once the plan that it names is complete.

    Raises:
        IncompleteRunError: there is no such record.
        PlanError: the record is of another version, or its plan isn't there.
    """
    where = f"job {spec.name}, partition {ds}: record {name}"
    try:
        record = json.loads(_records(spec, ds).read_bytes(f"{name}.json"))
    except FileNotFoundError:
        raise IncompleteRunError(f"{where}: planning hasn't come to its end") from None
    version = record.get("record_version") if isinstance(record, dict) else None
    if version != _RECORD_VERSION:
        raise PlanError(
            f"{where} is of version {version!r}, this release reads version {_RECORD_VERSION}; use"
            " one release of batchllm-operator everywhere"
        )
    result: dict[str, Any] = record["result"]
    StoredPlan.open(result["plan_uri"])
    return result


def _records(spec: JobSpec, ds: str) -> Folder:
    return job_folder(spec, ds).child(_RECORDS)
