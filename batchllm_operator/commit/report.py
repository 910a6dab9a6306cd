"""The report of a committed plan, gathered from its stages' files; as JSON and as a page."""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchllm_operator.commit.answer_summary import summarize_answers
from batchllm_operator.commit.partition import model_name
from batchllm_operator.errors import PlanError, StorageError, TableError
from batchllm_operator.lake import LakeTable
from batchllm_operator.report.timelines import STEP_COLUMNS, condense
from batchllm_operator.shards.attempts import ShardProgress, Worker, attempt_name
from batchllm_operator.shards.job_status import ShardAttempts, bill_of, read_attempts
from batchllm_operator.shards.parts import ShardParts
from batchllm_operator.shards.reports import COMMITTED_FILE, holds_outputs
from batchllm_operator.shards.reuse_index import ReusedOutputs
from batchllm_operator.shards.row_errors import RowErrors
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.manifest import PlanManifest
from batchllm_operator.stored_plan.row_keys import key_texts
from batchllm_operator.stored_plan.run_report import (
    PAGE_FILE,
    REPORT_FILE,
    RunReport,
    SampleRow,
    ShardRun,
    Timeline,
)
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.vllm_plugin.scheduler.trace import CHUNK_SIZE_KEY, TRACE_SCHEMA

_NUM_SAMPLE_ROWS: Final = 3
_NUM_TIMELINES: Final = 3
_SHORTEST_S: Final = 1e-3
"""Duration of a step if it is unknown."""
_MOST_STEPS: Final = 1_000_000
"""Earlier engines' traces beyond this are dropped; a step takes some 100 bytes of memory."""
_MOST: Final = 1 << 40
"""Upper bound of a step's counts, and of seconds since the first step."""
_log = logging.getLogger(__name__)


def describe_run(
    plan: StoredPlan, table: LakeTable, shards: Sequence[ShardParts], errors: RowErrors
) -> RunReport:
    """The report of a plan whose outputs are published; `shards` are in order."""
    manifest, spec = plan.manifest, plan.manifest.spec
    attempts = _attempts(plan)
    runs = tuple(
        ShardRun(
            shard_idx=shard_idx,
            done=Counts.total(shard.entries),
            num_attempts=begun.num_attempts,
            # Unknown if an attempt has no progress, or none had a GPU.
            gpu_s=round(begun.gpu_s, 1) if begun.is_complete and begun.gpu_s else None,
            predicted_gpu_s=planned.predicted_gpu_s,
            worker=begun.latest.worker if begun.latest else None,
        )
        for shard_idx, (shard, begun, planned) in enumerate(
            zip(shards, attempts, manifest.shards, strict=True)
        )
    )
    known = [run.gpu_s for run in runs if run.gpu_s is not None]
    answers = summarize_answers(spec, manifest.answers, [*shards, ReusedOutputs(plan)])
    for warning in answers.warnings:
        _log.warning("%s", warning)
    return RunReport(
        job=spec.name,
        ds=manifest.ds,
        run_id=manifest.run_id,
        plan_uri=plan.folder.uri,
        table_uri=table.uri,
        report_uri=f"{plan.folder.uri}/{REPORT_FILE}",
        model=model_name(spec),
        committed_at=_first_committed(plan.folder) or datetime.now(UTC),
        plan=manifest.counts,
        done=Counts.total(run.done for run in runs),
        errors_by_kind=dict(errors.counts),
        errors=errors.kinds(plan),
        bill=bill_of(manifest, sum(known) if len(known) == len(runs) else None),  # 0 without shards
        num_shards=len(manifest.shards),
        shards=runs,
        timelines=_timelines(plan, runs, attempts),
        sharing=manifest.sharing,
        num_workers=len({begun.latest.maker for begun in attempts if begun.latest}),
        answers=answers,
        sample_rows=_sample(table, manifest),
    )


def store_page(folder: Folder, report: RunReport) -> None:
    """Create `report.html` in the plan's folder, or replace it if it is outdated.

    A page that can't be rendered or written leads to a warning only, as the rows are published.
    """
    from batchllm_operator.report.page import render_report

    try:
        page = render_report(report).encode()
        try:
            if folder.read_bytes(PAGE_FILE) == page:
                return
        except FileNotFoundError:
            pass
        folder.write_bytes(PAGE_FILE, page)
    # Any error: a nightly job must not fail, and run again, because of a page.
    except Exception as error:  # noqa: BLE001
        _log.warning("%s/%s isn't written: %r", folder.uri, PAGE_FILE, error)


def load_report(plan_uri: str) -> RunReport:
    """The stored report of a committed plan.

    Raises:
        PlanError: the plan is absent, wasn't committed, or this release can't read its report.
    """
    plan = StoredPlan.open(plan_uri)
    report = RunReport.read(plan.folder, REPORT_FILE)
    if report is not None:
        return report
    why = "it wasn't committed yet"
    if plan.folder.exists(COMMITTED_FILE):
        why = "it was committed, and the file removed since; commit makes it again"
    elif _is_published(plan):
        why = "its rows are published, but a report wasn't written; commit again to write it"
    raise PlanError(f"plan {plan_uri}: has no {REPORT_FILE}: {why}")


def _is_published(plan: StoredPlan) -> bool:
    try:
        return holds_outputs(plan)
    except TableError:  # another job's rows
        return False


def _first_committed(folder: Folder) -> datetime | None:
    """The time of the plan's first commit, which a repeated commit keeps."""
    try:
        report = RunReport.read(folder, REPORT_FILE)
    except PlanError:
        return None
    return None if report is None else report.committed_at


def _attempts(plan: StoredPlan) -> list[ShardAttempts]:
    """What attempts have left of each shard; if that can't be read, only the bill is unknown."""
    try:
        attempts = read_attempts(plan)
    except StorageError as error:
        _log.warning("plan %s: what its attempts took isn't known: %s", plan.folder.uri, error)
        attempts = {}
    for note in (note for begun in attempts.values() for note in begun.notes):
        _log.warning("%s", note)
    return [attempts.get(idx, ShardAttempts()) for idx in range(len(plan.manifest.shards))]


def _timelines(
    plan: StoredPlan, runs: Sequence[ShardRun], attempts: Sequence[ShardAttempts]
) -> tuple[Timeline, ...]:
    """Of the workers that took longest; an engine's traces lie with its worker's first attempt."""
    engine_s = defaultdict[Worker, float](float)
    for run, begun in zip(runs, attempts, strict=True):
        if begun.latest is not None:
            engine_s[begun.latest.maker] += run.done.engine_s
    made = (progress for begun in attempts for progress in begun.progress)
    latest_first = sorted(made, key=lambda progress: progress.started_at, reverse=True)
    first = {progress.maker: progress for progress in latest_first}
    slowest = heapq.nlargest(_NUM_TIMELINES, engine_s, key=lambda worker: engine_s[worker])
    began = [first[worker] for worker in slowest]
    read = (read_timeline(plan.run_folder(start.shard_idx), start) for start in began)
    return tuple(line for line in read if line is not None)


def read_timeline(folder: Folder, began: ShardProgress) -> Timeline | None:
    """The timeline of the engine with which a worker began an attempt in a shard's run folder.

    None if there is no trace (vLLM's own scheduler, a killed process), or, with a warning, no
    readable one.
    """
    try:
        names = folder.find()
    except StorageError as error:
        _log.warning("%s: its traces aren't in the report: %s", folder.uri, error)
        return None
    begins = f"{attempt_name(began.attempt)}/trace-"
    paths = sorted(path for path in names if path.startswith(begins) and path.endswith(".parquet"))
    traces = []
    for path in paths:
        try:
            trace = _read_trace(folder, path)
        except (pa.ArrowException, OSError, StorageError) as error:
            _log.warning("%s/%s isn't in the report: %s", folder.uri, path, error)
        else:
            traces += [trace] if trace.num_rows else []
        while len(traces) > 1 and sum(trace.num_rows for trace in traces) > _MOST_STEPS:
            traces.pop(0)
    return _condensed(traces, began) if traces else None


def _read_trace(folder: Folder, path: str) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(folder.read_bytes(path)))
    schema = pa.schema([(name, TRACE_SCHEMA.field(name).type) for name in STEP_COLUMNS])
    if not set(STEP_COLUMNS) <= set(file.schema_arrow.names):
        raise pa.ArrowInvalid("it has other columns")
    noted = (file.schema_arrow.metadata or {}).get(CHUNK_SIZE_KEY, b"")
    if not (noted.isdigit() and len(noted) < 10):
        raise pa.ArrowInvalid("it lacks the chunk size")
    table = file.read(list(STEP_COLUMNS)).select(STEP_COLUMNS)
    table = table.cast(schema.with_metadata(table.schema.metadata))
    for name in STEP_COLUMNS if table.num_rows else ():
        values = table[name].to_numpy()  # None becomes NaN, for which comparisons are False
        if not (values.min() >= 0 and values.max() < _MOST):
            raise pa.ArrowInvalid(f"{name} has what can't be one")
    if np.any(np.diff(table["start_s"].to_numpy()) < 0):
        raise pa.ArrowInvalid("its steps aren't in order")
    return table


def _condensed(traces: Sequence[pa.Table], began: ShardProgress) -> Timeline:
    """The timeline of traces, one after the other; the end of a last step is estimated."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in STEP_COLUMNS}
    before_s = 0.0
    for table in traces:
        start_s = table["start_s"].to_numpy()
        last_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 0.0
        for name in STEP_COLUMNS:
            parts[name].append(table[name].to_numpy())
        parts["start_s"][-1] = start_s + before_s
        before_s += float(start_s[-1]) + max(last_s, _SHORTEST_S)
    steps = {name: np.concatenate(values) for name, values in parts.items()}
    chunk_size = int(traces[-1].schema.metadata[CHUNK_SIZE_KEY])
    return condense(steps, before_s, chunk_size, shard_idx=began.shard_idx, worker=began.worker)


def _sample(table: LakeTable, manifest: PlanManifest) -> tuple[SampleRow, ...]:
    key = manifest.spec.input.key
    if manifest.spec.is_pooled:  # a vector says nothing to a reader
        return ()
    samples: list[SampleRow] = []
    for batch in table.scan(table.snapshot(manifest.ds), [*key, "generated_text"]):
        for idx, text in enumerate(batch.column("generated_text").to_pylist()):
            if text is not None and len(samples) < _NUM_SAMPLE_ROWS:
                samples.append(SampleRow(key=key_texts(batch, idx, key), generated_text=text))
        if len(samples) == _NUM_SAMPLE_ROWS:
            break
    return tuple(samples)
