"""The run stage: shards of a plan, streamed through an engine into output parts."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

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
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import Observe, interval_s
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.shard_run import Holder, Lap, missing_parts, store_report
from batchllm_operator.run.shard_source import Claimed, OneShard, WorkerReport
from batchllm_operator.run.shard_tally import DEFAULT_INTERVAL_S
from batchllm_operator.run.worker import Start, Worker
from batchllm_operator.shards.attempts import check_free, claim_attempt
from batchllm_operator.shards.committed import committed_shard, find_committed
from batchllm_operator.shards.parts import read_ledger
from batchllm_operator.shards.report import ShardReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_log = logging.getLogger(__name__)


def run_shard(
    plan_uri: str,
    shard_idx: int,
    *,
    start: Start = start_engine,
    num_gpus: int | None = None,
    owner: str | None = None,
    drain: Drain | None = None,
    observe: Observe | None = None,
) -> ShardReport:
    """Generate every request of a shard that is in no finished part yet.

    Parts are written as they finish. What is finished of others is spilled from time to time and
    at the end, also after an error or a signal, and the next run goes on from there. If nothing is
    left to do, no attempt and no engine is started: all parts are finished, the plan is committed,
    or a small partition needs no shard of that number.

    Args:
        plan_uri: the plan.
        shard_idx: the shard of it, from 0.
        start: creates the engine.
        num_gpus: GPUs of this process, for all replicas together; None for the spec's number.
        owner: the owner of the attempt, which doesn't begin while another owner's is live; None to
            begin in any case.
        drain: once it has begun, no further part is opened and the open ones are finished.
        observe: see `live_progress.Observe`.

    Raises:
        PlanError: the plan or the shard is absent, corrupted or of another version, or the
            model isn't the one that the plan was made with.
        ModelError: the model's tokenizer can't be loaded.
        SpecError: the engine doesn't know a setting, or the spec needs another number of GPUs.
        EngineError: the engine can't start, or keeps dying.
        FencedError: a later attempt at the shard has begun, or another owner's is live.
        FailedRowsError: so many rows have failed that commit will refuse the plan, by this shard
            and planning alone. What is finished is kept.
        Interrupted: `drain` has begun, and parts are left.
    """
    plan = _with_gpus(StoredPlan.open(plan_uri), num_gpus)
    if (settled := _settled(plan, shard_idx)) is not None:
        return settled
    folder = plan.run_folder(shard_idx)
    entries = read_ledger(folder, plan.manifest.plan_id)
    if not missing_parts(plan, shard_idx, entries):
        return store_report(plan, shard_idx, entries, len(entries))
    if owner is not None:
        check_free(folder, owner)
    with plan.open_shard(shard_idx):  # before the claim: it may be damaged
        _check_model(plan)
    claimed = Claimed(shard_idx, claim_attempt(folder, owner), entries)
    if num_gpus is None:
        num_gpus = num_gpus_of(plan.manifest.spec)
    holder = Holder(drain or Drain(), Lap(), num_gpus, interval_s(), observe)
    shards = OneShard(claimed, plan.shard(shard_idx).num_rows)
    return _work(Worker(plan, shards, start, holder))[shard_idx]


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
) -> WorkerReport:
    """Run shards of a plan through one engine, beside other workers, until none is left (ADR 33).

    It starts with its own run of the plan's order, then helps others, and takes over shards that an
    attempt has left. While others run the last shards, it waits for at most two minutes. Without
    a shard to run, no engine is started.

    Args:
        plan: its address, or the plan that `plan_job` returned.
        worker: its number, from 0. Of two with the same number, each takes other shards.
        num_workers: may differ from one call to the next.
        start, num_gpus, observe: see `run_shard`.
        owner: attempts of the same owner count as left, others' only once they show no sign of
            life.
        drain: once it has begun, no further part is opened, and no shard claimed.
        replica: which of the spec's replicas this worker is, in a process with its GPUs only; None
            for all of them as one engine.

    Raises:
        ValueError: there is no such worker.
        FailedRowsError: as in `run_shard`, by all shards as far as this worker has seen them.
        PlanError, ModelError, SpecError, EngineError, Interrupted: see `run_shard`.
    """
    if not 0 <= worker < num_workers:
        raise ValueError(f"worker {worker} isn't one of {num_workers}")
    plan = _with_gpus(StoredPlan.open(plan), num_gpus)
    num_shards = len(plan.manifest.shards)
    if find_committed(plan) is not None:
        _log.info("the plan is committed: there is nothing left to do")
        return WorkerReport(worker, num_workers, num_shards, num_shards, [], {})
    if replica is not None:
        plan = _as_replica(plan, replica)
    queue = ShardQueue(plan, worker, num_workers, owner=owner)
    if queue.next_shard() is not None or queue.others():
        _check_model(plan)
    if num_gpus is None or replica is not None:
        num_gpus = num_gpus_of(plan.manifest.spec)
    # Other workers would take a shard without progress for lost.
    every_s = interval_s() or DEFAULT_INTERVAL_S
    holder = Holder(drain or Drain(), Lap(), num_gpus, every_s, observe, worker, num_workers)
    reports = _work(Worker(plan, queue, start, holder))
    others = queue.others()
    return WorkerReport(worker, num_workers, num_shards, queue.num_finished, others, reports)


def replica_environments(plan_uri: str, num_gpus: int | None = None) -> list[dict[str, str]]:
    """Environment variables of the processes in which a worker's replicas are workers themselves.

    Empty if there is one replica, or if replicas compute prefixes of the plan together: then all
    of them are one engine.

    Raises:
        PlanError: see `run_shard`.
        SpecError: the spec's replicas don't fit the GPUs.
    """
    plan = _with_gpus(StoredPlan.open(plan_uri), num_gpus)
    spec = plan.manifest.spec
    if spec.engine.replicas == 1 or any(shard.is_chained for shard in plan.manifest.shards):
        return []
    return [replica_environment(spec, rank) for rank in range(spec.engine.replicas)]


def _as_replica(plan: StoredPlan, rank: int) -> StoredPlan:
    """The plan for a process that is one of its replicas; on a CPU, it keeps to its cores."""
    spec = plan.manifest.spec
    if spec.engine.backend != "fake" and runs_on_cpu():
        os.sched_setaffinity(0, replica_cores(spec.engine.replicas, rank))
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"replicas": 1})})
    return replace(plan, manifest=plan.manifest.model_copy(update={"spec": spec}))


def _work(worker: Worker) -> dict[int, ShardReport]:
    for pause_s in worker.steps():
        if pause_s:
            time.sleep(pause_s)
    return worker.reports


def _settled(plan: StoredPlan, shard_idx: int) -> ShardReport | None:
    """The report of a shard that needs no run; None for any other."""
    if plan.manifest.is_spare(shard_idx):
        _log.info("the plan needs no shard %d: it has %d", shard_idx, len(plan.manifest.shards))
        return ShardReport.of_parts(plan.manifest.plan_id, shard_idx, [], 0)
    if (committed := committed_shard(plan, shard_idx)) is not None:
        _log.info("shard %d is committed: there is nothing left to do", shard_idx)
        return committed
    return None


def _check_model(plan: StoredPlan) -> None:
    """Check that tokenizer and model are those of the plan, whose token ids only they fit."""
    manifest = plan.manifest
    found = load_tokenizer(manifest.spec, manifest.ds)
    for what, planned, present in (
        ("tokenizer", manifest.tokenizer_fingerprint, found.fingerprint),
        ("version", manifest.model_version, found.model_version),
    ):
        if planned != present:
            raise PlanError(
                f"plan {plan.folder.uri}: the {what} of model {manifest.spec.model.path} isn't"
                " the one that the plan was made with; make the plan again"
            )
    _check_adapters(plan)


def _check_adapters(plan: StoredPlan) -> None:
    """Check that the adapters are those of the plan."""
    model, planned = plan.manifest.spec.model, plan.manifest.adapter_versions
    for adapter, version in zip(find_adapters(model), planned, strict=True):
        if adapter.version != version:
            raise PlanError(
                f"plan {plan.folder.uri}: model.adapters.{adapter.name} isn't the one that the plan"
                " was made with; make the plan again"
            )


def _with_gpus(plan: StoredPlan, num_gpus: int | None) -> StoredPlan:
    """The plan for `num_gpus`, which must fit its spec if that has a number."""
    spec = plan.manifest.spec
    engine, num_stages = spec.engine, num_stages_of(spec)
    num_workers = engine.replicas * num_stages
    if num_gpus is None or num_workers * engine.tensor_parallel_size == num_gpus:
        return plan
    if engine.tensor_parallel_size != 1:
        what = f"engine.tensor_parallel_size is {engine.tensor_parallel_size}"
        if engine.replicas > 1:
            what += f" and engine.replicas {engine.replicas}"
        raise SpecError(
            f"{what}, but the task has {counted(num_gpus, 'GPU')}; give it as many, or leave the"
            " setting out"
        )
    each, rest = divmod(num_gpus, num_workers)
    if rest or not each:
        what = f"engine.replicas is {engine.replicas}"
        if num_stages > 1:
            what += f" and pipeline_parallel_size {num_stages}"
        gpus = counted(num_gpus, "GPU")
        raise SpecError(f"{what}, but the task has {gpus}, which they can't share evenly")
    engine, planner = engine.model_copy(update={"tensor_parallel_size": each}), spec.planner
    if engine.reason_against_chains is not None:  # `chain_job` warns if the plan has chains
        planner = planner.model_copy(update={"runahead": "off", "link_bytes_per_s": None})
    spec = spec.model_copy(update={"engine": engine, "planner": planner})
    return replace(plan, manifest=plan.manifest.model_copy(update={"spec": spec}))
