"""Checks that a stage's results are complete in the lake, which decides its task's success."""

import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

from batchllm_operator.amounts import counted
from batchllm_operator.errors import DamagedFileError, IncompleteRunError, PlanError
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.shards.reports import WorkerReport, find_committed
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_json import StoredJson
from batchllm_operator.stored_plan.stored_plan import StoredPlan, job_folder


class PlanRecord(StoredJson):
    """The result of planning, for a caller without access to the process."""

    what = "record of a plan"
    version_field = "record_version"
    cure = "plan again"

    record_version: Literal[1] = 1
    result: dict[str, Any]


def verify_worker(
    plan_uri: str, worker: int = 0, num_workers: int = 1, owner: str | None = None
) -> WorkerReport:
    """Check that nothing of a plan is left for a worker to run; read-only.

    Every shard is finished, or another worker is at work on it. Finished shards of the worker's own
    run of the plan's order are checked part by part, others by their reports; so all workers
    together check each once.

    Args:
        owner: see `run_worker`; the counts are those of its shards. Without it, of all shards.

    Raises:
        PlanError: the plan is absent, or it or a report is of another version.
        IncompleteRunError: a shard is free to run, or a report or a part of it is damaged.
    """
    plan = StoredPlan.open(plan_uri)
    num_shards = len(plan.manifest.shards)
    if find_committed(plan) is not None:
        return WorkerReport(worker, num_workers, num_shards, num_shards, [], {})
    queue = ShardQueue(plan, worker, num_workers, owner=owner)
    free = queue.next_shard()
    if free is None and (pause_s := queue.unsure_for_s()) > 0:
        time.sleep(pause_s)
        free = queue.next_shard()
    if free is not None:
        num_finished = num_shards - queue.num_left
        raise IncompleteRunError(
            f"plan {plan_uri}: {num_finished:,} of {counted(num_shards, 'shard')} finished, and no"
            f" worker runs shard {free}; `batchllm run --plan {plan_uri}` does the rest"
        )
    return queue.report(queue.reports())


def record_plan(spec: JobSpec, ds: str, name: str, result: Mapping[str, Any]) -> None:
    """Store the result of planning under `name`, for a caller without access to this process."""
    folder, file_name = _place(spec, ds, name)
    folder.write_bytes(file_name, PlanRecord(result=dict(result)).to_bytes())


def verify_plan(spec: JobSpec, ds: str, name: str) -> dict[str, Any]:
    """The result that `record_plan` stored, if the plan that it names is complete.

    Raises:
        IncompleteRunError: there is no such record, or it is damaged.
        PlanError: the record is of another version or names no plan, or its plan is missing.
    """
    where = f"job {spec.name}, partition {ds}: record {name}"
    try:
        record = PlanRecord.read(*_place(spec, ds, name))
    except DamagedFileError as error:
        raise IncompleteRunError(f"{where}: {error}") from error
    if record is None:
        raise IncompleteRunError(f"{where}: planning hasn't come to its end")
    result = record.result
    if not isinstance(result.get("plan_uri"), str):
        raise PlanError(f"{where}: names no plan; plan again")
    StoredPlan.open(result["plan_uri"])
    return result


def _place(spec: JobSpec, ds: str, name: str) -> tuple[Folder, str]:
    return job_folder(spec, ds).child("records"), f"{quote(name, safe='')}.json"
