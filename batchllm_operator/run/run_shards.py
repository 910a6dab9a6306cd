"""The run stage: shards of a plan, streamed through an engine into output parts."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchllm_operator.amounts import counted
from batchllm_operator.engine import start_engine
from batchllm_operator.engine.gpus import (
    num_gpus_of,
    num_stages_of,
    replica_cores,
    replica_environment,
    runs_on_cpu,
)
from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.model import find_adapters
from batchllm_operator.prompts import joint_fingerprint, load_tokenizers
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import Holder, Observe, interval_s
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.worker import Start, Worker
from batchllm_operator.shards.reports import WorkerReport, find_committed
from batchllm_operator.stored_plan.stored_plan import StoredPlan

if TYPE_CHECKING:
    from batchllm_operator.run.replicas import Replicas

_log = logging.getLogger(__name__)


def run_worker(
    plan: str | Path | StoredPlan,
    worker: int = 0,
    num_workers: int = 1,
    *,
    start: Start = start_engine,
    num_gpus: int | None = None,
    owner: str | None = None,
    drain: Drain | None = None,
    observe: Observe | None = None,
    replica: int | None = None,
    meeting_folder: Path | None = None,
) -> WorkerReport:
    """Run shards of a plan through one engine, beside other workers, until none is left (ADR 33).

    See `ShardQueue` for their order. While others run the last shards, it waits for at most two
    minutes. Without a shard to run, no engine is started. After an error or a signal, the next run
    goes on from the finished rows.

    Args:
        plan: its address, or the plan that `plan_job` returned.
        worker: its number, from 0. Of two with the same number, each takes other shards. One from
            `num_workers` on, which may differ between calls, only helps: it has no run of its own.
        num_gpus: GPUs of this process, for all replicas together; None for the spec's number.
        owner: attempts of the same owner count as left, others' once they show no sign of life.
        drain: once it has begun, no further part is opened, and no shard claimed.
        replica: which of the spec's replicas this worker is, in a process with its GPUs only; None
            for the only one.
        meeting_folder: where replicas meet to compute prefixes together; None for no such prefixes.

    Raises:
        ValueError: there is no such worker.
        PlanError: the plan is absent, damaged or of another version, or has another model.
        ModelError: the model's tokenizer can't be loaded.
        SpecError: the engine doesn't know a setting, or the spec needs another number of GPUs.
        EngineError: the engine can't start, or keeps dying.
        FailedRowsError: so many rows have failed, as far as this worker has seen, that commit will
            refuse the plan. Finished rows are kept.
        LimitError: the plan's runs have used what `limits` allows, and parts are left.
        Interrupted: `drain` has begun, and parts are left.
    """
    if worker < 0 or num_workers < 1:
        raise ValueError(f"worker {worker} of {num_workers}: there is no such worker")
    plan = _with_gpus(StoredPlan.open(plan), num_gpus)
    num_shards = len(plan.manifest.shards)
    if find_committed(plan) is not None:
        _log.info("the plan is committed: there is nothing left to do")
        return WorkerReport(worker, num_workers, num_shards, num_shards, [], {})
    replicas = _meeting_replicas(plan, meeting_folder, replica)
    if replica is not None:
        plan = _as_replica(plan, replica)
    first = [idx for idx, shard in enumerate(plan.manifest.shards) if shard.is_chained]
    queue = ShardQueue(plan, worker, num_workers, owner=owner, first=first if replicas else ())
    if queue.next_shard() is not None or queue.others():
        _check_model(plan)
    if num_gpus is None or replica is not None:
        num_gpus = num_gpus_of(plan.manifest.spec)
    drain = drain or Drain()
    holder = Holder(worker, num_workers, num_gpus, interval_s(), drain=drain, observe=observe)
    running = Worker(plan, queue, start, holder, replicas=replicas)
    for pause_s in running.steps():
        if pause_s:
            time.sleep(pause_s)
    return queue.report(running.reports)


def _meeting_replicas(
    plan: StoredPlan, folder: Path | None, replica: int | None
) -> Replicas | None:
    """The replicas that this one computes prefixes with; None if they compute none together."""
    chained = any(shard.is_chained for shard in plan.manifest.shards)
    if folder is None or replica is None or not chained:
        return None
    if (reason := plan.manifest.spec.reason_against_chains) is not None:
        _log.warning("replicas compute no prefix together: %s", reason)
        return None
    from batchllm_operator.run.replicas import Replicas

    return Replicas(plan, folder, replica)


def replica_environments(plan_uri: str, num_gpus: int | None = None) -> list[dict[str, str]]:
    """Environment variables of the processes in which a worker's replicas are workers themselves.

    Empty if there is one replica; raises like `run_worker`.
    """
    plan = _with_gpus(StoredPlan.open(plan_uri), num_gpus)
    spec = plan.manifest.spec
    if spec.engine.replicas == 1:
        return []
    return [replica_environment(spec, rank) for rank in range(spec.engine.replicas)]


def _as_replica(plan: StoredPlan, rank: int) -> StoredPlan:
    """The plan for a process that is one of its replicas; on a CPU, it keeps to its cores."""
    spec = plan.manifest.spec
    if spec.engine.backend != "fake" and runs_on_cpu():
        os.sched_setaffinity(0, replica_cores(spec.engine.replicas, rank))
    return _with_spec(plan, engine=spec.engine.model_copy(update={"replicas": 1}))


def _with_spec(plan: StoredPlan, **changes: object) -> StoredPlan:
    spec = plan.manifest.spec.model_copy(update=changes)
    return replace(plan, manifest=plan.manifest.model_copy(update={"spec": spec}))


def _check_model(plan: StoredPlan) -> None:
    """Check that tokenizer, model and adapters are those of the plan, whose token ids they fit."""
    manifest = plan.manifest
    model = manifest.spec.model
    tokenizers = load_tokenizers(manifest.spec, manifest.ds)
    planned, found = manifest.tokenizer_fingerprint, joint_fingerprint(tokenizers)
    version = tokenizers[0].model_version
    checks = [
        (f"the tokenizer of model {model.path}", planned, found),
        (f"the version of model {model.path}", manifest.model_version, version),
    ]
    for adapter, planned in zip(find_adapters(model), manifest.adapter_versions, strict=True):
        checks.append((f"model.adapters.{adapter.name}", planned, adapter.version))
    for what, planned, present in checks:
        if planned != present:
            raise PlanError(
                f"plan {plan.folder.uri}: {what} isn't the one that the plan was made with; make"
                " the plan again"
            )


def _with_gpus(plan: StoredPlan, num_gpus: int | None) -> StoredPlan:
    """The plan for `num_gpus`, which must fit its spec if that has a number."""
    spec = plan.manifest.spec
    engine, num_stages = spec.engine, num_stages_of(spec)
    num_workers, tensor_size = engine.replicas * num_stages, engine.tensor_parallel_size
    if num_gpus is None or num_workers * tensor_size == num_gpus:
        return plan
    gpus = counted(num_gpus, "GPU")
    if tensor_size != 1:
        more = f" and engine.replicas {engine.replicas}" if engine.replicas > 1 else ""
        raise SpecError(
            f"engine.tensor_parallel_size is {tensor_size}{more}, but the task has {gpus}; give it"
            " as many, or leave the setting out"
        )
    num_each, rest = divmod(num_gpus, num_workers)
    if rest or not num_each:
        more = f" and pipeline_parallel_size {num_stages}" if num_stages > 1 else ""
        raise SpecError(
            f"engine.replicas is {engine.replicas}{more}, but the task has {gpus}, which they can't"
            " share evenly"
        )
    engine, planner = engine.model_copy(update={"tensor_parallel_size": num_each}), spec.planner
    if engine.reason_against_chains is not None:  # `_meeting_replicas` warns if the plan has chains
        planner = planner.model_copy(update={"runahead": "off", "link_bytes_per_s": None})
    return _with_spec(plan, engine=engine, planner=planner)
