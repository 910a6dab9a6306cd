"""The run stage: one shard of a plan, streamed through an engine into output parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from batchllm_operator.artifacts.attempts import Attempt, check_free, claim_attempt
from batchllm_operator.artifacts.committed import committed_shard
from batchllm_operator.artifacts.manifest import PlanManifest, ReplicaPlacement
from batchllm_operator.artifacts.parts import PartEntry, read_ledger, write_part
from batchllm_operator.artifacts.shard_report import ShardReport, write_report
from batchllm_operator.artifacts.stored_plan import StoredPlan
from batchllm_operator.artifacts.stored_profiles import StoredProfiles, profiles_folder
from batchllm_operator.engine import Engine, EngineJob, EngineOutput, EngineRequest, start_engine
from batchllm_operator.engine.gpus import num_gpus_of, num_stages_of
from batchllm_operator.errors import PlanError, SpecError
from batchllm_operator.planner import matrix_seconds
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import Observe, ProgressWriter, interval_s, live_progress
from batchllm_operator.run.shard_tally import DEFAULT_INTERVAL_S, ShardTally
from batchllm_operator.run.shard_work import ShardWork
from batchllm_operator.run.traces import traced
from batchllm_operator.spec import JobSpec
from batchllm_operator.vllm_plugin.scheduler.hints import StepCost

_log = logging.getLogger(__name__)


def run_shard(
    plan_uri: str,
    shard_idx: int,
    *,
    start: Callable[[JobSpec, EngineJob], Engine] = start_engine,
    num_gpus: int | None = None,
    owner: str | None = None,
    drain: Drain | None = None,
    observe: Observe | None = None,
) -> ShardReport:
    """Generate every request of a shard that is in no finished part yet.

    Parts are written as they finish; an interruption drops the open ones, with which the next run
    starts. Only open parts are in memory. If nothing is left to do, no attempt and no engine is
    started: all parts are finished, the plan is committed, or a small partition needs no shard of
    that number.

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
        Interrupted: `drain` has begun, and parts are left.
    """
    plan = _with_gpus(StoredPlan.open(plan_uri), num_gpus)
    if (settled := _settled(plan, shard_idx)) is not None:
        return settled
    folder = plan.run_folder(shard_idx)
    entries = read_ledger(folder, plan.manifest.plan_id)
    if not _missing(plan, shard_idx, entries):
        return _report(plan, shard_idx, entries, len(entries))
    if owner is not None:
        check_free(folder, owner)
    with plan.open_shard(shard_idx) as file:
        _check_model(plan)
        attempt = claim_attempt(folder, owner)
        plan.check_stays()
        # An earlier attempt may have finished parts until it saw the claim.
        entries = read_ledger(folder, plan.manifest.plan_id, entries)
        run = _ShardRun(plan, shard_idx, attempt, entries, drain or Drain(), num_gpus)
        return run.to_end(file, start, observe)


def _settled(plan: StoredPlan, shard_idx: int) -> ShardReport | None:
    """The report of a shard that needs no run; None for any other."""
    if plan.manifest.is_spare(shard_idx):
        _log.info("the plan needs no shard %d: it has %d", shard_idx, len(plan.manifest.shards))
        return ShardReport.of_parts(plan.manifest.plan_id, shard_idx, [], 0)
    if (committed := committed_shard(plan, shard_idx)) is not None:
        _log.info("shard %d is committed: there is nothing left to do", shard_idx)
        return committed
    return None


def _report(
    plan: StoredPlan, shard_idx: int, entries: Mapping[int, PartEntry], num_resumed_parts: int
) -> ShardReport:
    in_order = [entries[part_idx] for part_idx in sorted(entries)]
    report = ShardReport.of_parts(plan.manifest.plan_id, shard_idx, in_order, num_resumed_parts)
    write_report(plan.run_folder(shard_idx), report)
    return report


def _missing(plan: StoredPlan, shard_idx: int, entries: Mapping[int, PartEntry]) -> list[int]:
    num_parts = plan.manifest.shards[shard_idx].num_parts
    return [part_idx for part_idx in range(num_parts) if part_idx not in entries]


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
            f"{what}, but the task has {num_gpus} GPUs; give it as many, or leave the setting out"
        )
    each, rest = divmod(num_gpus, num_workers)
    if rest or not each:
        what = f"engine.replicas is {engine.replicas}"
        if num_stages > 1:
            what += f" and pipeline_parallel_size {num_stages}"
        raise SpecError(f"{what}, but the task has {num_gpus} GPUs, which they can't share evenly")
    engine, planner = engine.model_copy(update={"tensor_parallel_size": each}), spec.planner
    if engine.reason_against_chains is not None:  # `chain_job` warns if the plan has chains
        planner = planner.model_copy(update={"runahead": "off", "link_bytes_per_s": None})
    spec = spec.model_copy(update={"engine": engine, "planner": planner})
    return replace(plan, manifest=plan.manifest.model_copy(update={"spec": spec}))


def _pin_revision(manifest: PlanManifest) -> JobSpec:
    """The spec with the planned commit as revision, if the model is on the hub."""
    kind, _, commit = manifest.model_version.partition(":")
    if kind != "commit":
        return manifest.spec
    model = manifest.spec.model.model_copy(update={"revision": commit})
    return manifest.spec.model_copy(update={"model": model})


def _job(
    plan: StoredPlan, work: ShardWork, placement: ReplicaPlacement | None, trace_folder: Path
) -> EngineJob:
    profiles = StoredProfiles(profiles_folder(plan.manifest.spec))
    job = EngineJob(
        max_model_len=plan.manifest.max_model_len,
        num_requests=work.num_requests,
        step_cost=_step_cost(plan.manifest),
        profiles=profiles,
        trace_folder=trace_folder,
    )
    if placement is None:
        return job
    from batchllm_operator.run.replicas import chain_job

    return replace(
        job,
        spread_groups=frozenset(group.group_id for group in placement.spread),
        chain=chain_job(plan.manifest.spec, placement, work, profiles),
    )


def _has_estimates(spec: JobSpec) -> bool:
    """Whether planned output lengths tell more than the spec's limit."""
    return spec.planner.estimated_output_tokens is not None or spec.sampling.ignore_eos


def _step_cost(manifest: PlanManifest) -> StepCost | None:
    estimate = manifest.estimate
    if estimate is None:
        return None
    num_gpus = manifest.spec.engine.tensor_parallel_size
    token_s, weights_s = matrix_seconds(estimate.model, estimate.gpu, num_gpus)
    return StepCost(token_s, weights_s, estimate.gpu.step_overhead_s)


class _ShardRun:
    """An attempt at a shard: feeds parts to the engine and collects the outputs."""

    def __init__(
        self,
        plan: StoredPlan,
        shard_idx: int,
        attempt: Attempt,
        entries: dict[int, PartEntry],
        drain: Drain,
        num_gpus: int | None,
    ) -> None:
        self._plan, self._shard_idx, self._attempt = plan, shard_idx, attempt
        self._entries, self._drain, self._every_s = entries, drain, interval_s()
        self._tally = ShardTally(
            plan,
            shard_idx,
            attempt,
            entries.values(),
            num_gpus=num_gpus_of(plan.manifest.spec) if num_gpus is None else num_gpus,
            interval_s=self._every_s or DEFAULT_INTERVAL_S,
        )
        self._tally.hold_gpus()
        self._open_parts: dict[int, _OpenPart] = {}
        self._part_of: dict[int, int] = {}  # request_idx -> part_idx, for requests in the engine

    def to_end(
        self,
        file: pq.ParquetFile,
        start: Callable[[JobSpec, EngineJob], Engine],
        observe: Observe | None,
    ) -> ShardReport:
        """Generate the parts that the ledger lacks, and write the report; see `run_shard`."""
        num_resumed = len(self._entries)
        if self._attempt.number > 1:
            number = self._attempt.number
            _log.info("attempt %d: %d parts are finished already", number, num_resumed)
        with live_progress(self._attempt.folder, self._tally, self._every_s, observe) as writer:
            if missing := _missing(self._plan, self._shard_idx, self._entries):
                self._generate(file, missing, start, writer)
            num_left = len(_missing(self._plan, self._shard_idx, self._entries))
            self._drain.check(num_left=num_left)
            self._attempt.check_current()
            return _report(self._plan, self._shard_idx, self._entries, num_resumed)

    def _generate(
        self,
        file: pq.ParquetFile,
        missing: Sequence[int],
        start: Callable[[JobSpec, EngineJob], Engine],
        writer: ProgressWriter,
    ) -> None:
        manifest, shard = self._plan.manifest, self._plan.manifest.shards[self._shard_idx]
        has_estimates = _has_estimates(manifest.spec)
        first = shard.replicas.first_groups if shard.replicas is not None else []
        work = ShardWork(file, missing, has_estimates=has_estimates, first=first)
        with traced(self._attempt.folder) as trace_folder:
            job = _job(self._plan, work, shard.replicas, trace_folder)
            engine = start(_pin_revision(manifest), job)
            try:
                rows_before = sum(entry.num_rows for entry in self._entries.values())
                name = f"shard {self._shard_idx}"
                with Progress(name, shard.num_rows, initial=rows_before) as progress:
                    self._tally.begin_running()
                    writer.write_soon()
                    self._collect(engine, work, progress)
                self._drain.end()
            finally:
                engine.close()

    def _collect(self, engine: Engine, work: ShardWork, progress: Progress) -> None:
        """Run all parts through the engine; each is written after its last output."""
        part_started_at = time.monotonic()
        for output in engine.stream(self._requests(work)):
            part_idx = self._part_of.pop(output.request_idx)
            part = self._open_parts[part_idx]
            part.outputs.append(output)
            num_rows = len(part.row_idxs[output.request_idx])
            self._tally.count_output(output, num_rows)
            progress.advance(num_rows, self._tally.note())
            if len(part.outputs) < len(part.row_idxs):
                continue
            del self._open_parts[part_idx]
            now = time.monotonic()
            part_s, part_started_at = now - part_started_at, now
            plan_id = self._plan.manifest.plan_id
            entry = write_part(
                self._attempt, plan_id, part_idx, part.outputs, part.row_idxs, part_s
            )
            self._drain.num_open_parts = len(self._open_parts)
            self._tally.count_part(entry)
            self._entries[part_idx] = entry
        assert not self._open_parts, "the engine left requests without an output"

    def _requests(self, work: ShardWork) -> Iterator[EngineRequest]:
        for part_idx, table in work.parts():
            if self._drain.has_begun:
                return
            request_idxs = table["request_idx"].to_pylist()
            row_idxs = dict(zip(request_idxs, table["row_idxs"].to_pylist(), strict=True))
            self._open_parts[part_idx] = _OpenPart(row_idxs, [])
            self._drain.num_open_parts = len(self._open_parts)
            known = table.drop_columns(["request_idx", "row_idxs", "prompt_token_ids"]).to_pylist()
            for request_idx, hints, token_ids in zip(
                request_idxs, known, table["prompt_token_ids"], strict=True
            ):
                self._part_of[request_idx] = part_idx
                yield EngineRequest(
                    request_idx=request_idx, prompt_token_ids=token_ids.as_py(), **hints
                )


class _OpenPart(NamedTuple):
    """A part with requests in the engine."""

    row_idxs: dict[int, list[int]]
    outputs: list[EngineOutput]
