"""The commit stage: every row checked, then the partition replaced in one step."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow.compute as pc

from batchllm_operator.errors import (
    ConflictError,
    FailedRowsError,
    IncompleteRunError,
    PlanError,
    TableError,
)
from batchllm_operator.lake import LakeTable, Publication, open_table
from batchllm_operator.pipeline.committed import find_committed, mark_committed
from batchllm_operator.pipeline.partition import FinishedShard, model_name, write_partition
from batchllm_operator.pipeline.parts import read_ledger
from batchllm_operator.pipeline.reuse import ReusedOutputs
from batchllm_operator.pipeline.reuse_index import write_index
from batchllm_operator.pipeline.shard_report import REPORT_FILE, ShardReport
from batchllm_operator.pipeline.stored_plan import (
    StoredPlan,
    check_partition,
    check_publisher,
    job_folder,
)
from batchllm_operator.planner import saving_ratio
from batchllm_operator.planner.plan import ERROR_COLUMN, ERRORS_SCHEMA, ROWS_FILE, PlanManifest
from batchllm_operator.report import RunReport, SampleRow
from batchllm_operator.spec import JobSpec

_log = logging.getLogger(__name__)
_NUM_SAMPLE_ROWS: Final = 3


def commit_run(plan_uri: str) -> RunReport:
    """Publish the outputs of a finished plan, all rows or nothing.

    Committing again what is already published changes nothing.

    Raises:
        PlanError: the plan is absent, corrupted or of another version, its parts don't
            answer each row once, or a later plan's outputs have replaced its own.
        IncompleteRunError: parts are missing; names the shards to run.
        FailedRowsError: more rows failed than the spec allows.
        TableError: the output partition holds what another job or program wrote, or the table
            lacks a column of the outputs, or has it with another type.
        ConflictError: somebody else has published the partition meanwhile; plan again to replace
            that.
        CommitUnknownError: it may have been published; commit again to find out.
    """
    plan = StoredPlan.open(plan_uri)
    manifest = plan.manifest
    spec = manifest.spec
    table = open_table(spec.output.uri, spec.input.partition_column)
    if find_committed(plan) is not None and plan.folder.exists(REPORT_FILE):
        _log.info("partition %s already holds the outputs of this plan", manifest.ds)
        return load_report(plan_uri)
    plan.mark_committing()
    shards = _finished_shards(plan)
    seen = check_publisher(table, spec, manifest.ds)
    errors = _count_errors(plan, shards)
    if seen == plan.publication:
        _log.info("partition %s already holds the outputs of this plan", manifest.ds)
        return _write_report(plan, table, shards, errors)
    plan.check_current()
    _check_failed_fraction(spec, manifest, errors)
    with tempfile.TemporaryDirectory(prefix="batchllm-commit-") as spool:
        data = write_partition(plan, [*shards, ReusedOutputs(plan)], Path(spool))
        plan.mark_committing()  # again: that may have taken long
        plan.mark_older_plans(seen)
        _publish(plan, table, data, seen)
    return _write_report(plan, table, shards, errors)


def load_report(plan_uri: str) -> RunReport:
    """The report of a committed plan.

    Raises:
        PlanError: the plan isn't there, or wasn't committed.
    """
    plan = StoredPlan.open(plan_uri)
    try:
        data = plan.folder.read_bytes(REPORT_FILE)
    except FileNotFoundError as error:
        raise PlanError(
            f"plan {plan_uri}: has no {REPORT_FILE}: it wasn't committed yet"
        ) from error
    return RunReport.from_bytes(data, source=plan_uri)


def published_plan_uri(spec: JobSpec, ds: str) -> str:
    """Where the plan lies whose outputs partition `ds` of the output table holds.

    Raises:
        SpecError: `ds` can't name a partition.
        TableError: nothing is published there, or not by this job.
    """
    check_partition(ds)
    table = open_table(spec.output.uri, spec.input.partition_column)
    found = check_publisher(table, spec, ds)
    if found is None:
        raise TableError(f"table {table.uri}: partition {ds!r} has not been published")
    return job_folder(spec, ds).child(f"plan-{found.plan_id}").uri


def _finished_shards(plan: StoredPlan) -> list[FinishedShard]:
    shards, unfinished = [], []
    for shard_idx, shard in enumerate(plan.manifest.shards):
        folder = plan.run_folder(shard_idx)
        entries = read_ledger(folder, plan.manifest.plan_id)
        if set(entries) != set(range(shard.num_parts)):
            unfinished.append(f"shard {shard_idx} ({len(entries)} of {shard.num_parts} parts)")
        shards.append(FinishedShard(folder, list(entries.values())))
    if unfinished:
        raise IncompleteRunError(
            f"plan {plan.folder.uri}: unfinished: {', '.join(unfinished)}; run"
            " `batchllm run --plan ... --shard I` for these, then commit again"
        )
    return shards


def _publish(plan: StoredPlan, table: LakeTable, data: Path, seen: Publication | None) -> None:
    """Publish; what an older plan has published since `seen` was looked at is replaced, too.

    That plan passed its own check before it was marked. It can't come again: it has seen less.

    Raises:
        ConflictError: somebody else has published, or is about to.
    """
    spec, ds = plan.manifest.spec, plan.manifest.ds
    add_columns = spec.output.add_columns
    while True:
        if (by := plan.superseded_by()) is not None:
            raise ConflictError(
                f"output {table.uri}: partition {ds!r} is published meanwhile by {by}, a later"
                f" plan than {plan.folder.uri}, which wasn't published"
            )
        try:
            table.publish(plan.publication, data, replaces=seen, add_columns=add_columns)
            return
        except ConflictError:
            found = check_publisher(table, spec, ds)
            if found is None or found == seen or found.plan_id not in plan.older_plans():
                # A retry would see the winner's outputs, and replace what may be newer.
                StoredPlan.mark_superseded_at(plan.folder, by="another plan, published meanwhile")
                raise
            _log.info("plan %s was published meanwhile; it is older, and replaced", found.plan_id)
            seen = found


def _count_errors(plan: StoredPlan, shards: Sequence[FinishedShard]) -> Counter[str]:
    """Failed rows by kind: what stands before the colon of an error."""
    kinds: Counter[str] = Counter()
    num_rows = plan.manifest.counts.num_rows
    with plan.open_parquet(ROWS_FILE, ERRORS_SCHEMA, num_rows) as file:
        for batch in file.iter_batches(columns=[ERROR_COLUMN]):
            kinds.update(_kind(error) for error in batch.column(0).drop_null().to_pylist())
    for shard in shards:
        if not any(entry.num_failed_rows for entry in shard.entries):
            continue
        for part in shard.parts(["row_idxs", "error"]):
            failed = part.filter(pc.is_valid(part["error"]))
            for error, row_idxs in zip(
                failed["error"].to_pylist(), failed["row_idxs"].to_pylist(), strict=True
            ):
                kinds[_kind(error)] += len(row_idxs)
    return kinds


def _kind(error: str) -> str:
    return error.partition(":")[0]


def _check_failed_fraction(spec: JobSpec, manifest: PlanManifest, errors: Counter[str]) -> None:
    num_rows, num_failed = manifest.counts.num_rows, errors.total()
    if num_failed and num_failed > spec.max_failed_fraction * num_rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.most_common())
        raise FailedRowsError(
            f"{num_failed} of {num_rows} rows failed ({kinds}), more than max_failed_fraction"
            f" {spec.max_failed_fraction} allows; nothing was published. To publish all the same,"
            " raise it, plan again and commit: finished parts are kept"
        )


def _write_report(
    plan: StoredPlan, table: LakeTable, shards: Sequence[FinishedShard], errors: Counter[str]
) -> RunReport:
    """Write what the published plan did, then that it is committed: the report is there by then."""
    manifest = plan.manifest
    counts, spec = manifest.counts, manifest.spec
    entries = [entry for shard in shards for entry in shard.entries]
    total = ShardReport.of(manifest.plan_id, 0, entries, 0)
    num_computed = total.num_prompt_tokens - total.num_cached_tokens
    num_tokens = total.num_prompt_tokens + total.num_output_tokens
    report = RunReport(
        job=spec.name,
        ds=manifest.ds,
        run_id=manifest.run_id,
        plan_uri=plan.folder.uri,
        table_uri=table.uri,
        report_uri=f"{plan.folder.uri}/{REPORT_FILE}",
        model=model_name(spec),
        num_rows_in=counts.num_rows,
        num_rows_out=counts.num_rows - errors.total(),
        num_rows_failed=errors.total(),
        num_rows_duplicate=counts.num_duplicate_rows,
        num_rows_reused=counts.num_reused_rows,
        errors_by_kind=dict(errors),
        num_requests=counts.num_requests,
        num_groups=counts.num_groups,
        num_shared_groups=counts.num_shared_groups,
        num_shards=len(manifest.shards),
        num_logical_tokens=counts.num_logical_tokens,
        num_computed_tokens=num_computed,
        num_output_tokens=total.num_output_tokens,
        optimal_saving_ratio=manifest.optimal_saving_ratio,
        planned_saving_ratio=manifest.planned_saving_ratio,
        achieved_saving_ratio=saving_ratio(num_computed, total.num_logical_tokens),
        engine_s=total.engine_s,
        tokens_per_s=round(num_tokens / total.engine_s, 1) if total.engine_s else 0.0,
        sample_rows=_sample(table, manifest),
    )
    plan.folder.write_bytes(REPORT_FILE, report.model_dump_json(indent=1).encode())
    mark_committed(
        plan,
        [
            ShardReport.of(manifest.plan_id, shard_idx, shard.entries, len(shard.entries))
            for shard_idx, shard in enumerate(shards)
        ],
        write_index(plan, [*shards, ReusedOutputs(plan)]),
    )
    return report


def _sample(table: LakeTable, manifest: PlanManifest) -> tuple[SampleRow, ...]:
    """The first rows of the published partition that have a text."""
    key = manifest.spec.input.key
    samples: list[SampleRow] = []
    for batch in table.scan(table.snapshot(manifest.ds), [*key, "generated_text"]):
        for row in batch.to_pylist():
            if row["generated_text"] is not None and len(samples) < _NUM_SAMPLE_ROWS:
                shown = {name: str(row[name]) for name in key}
                samples.append(SampleRow(key=shown, generated_text=row["generated_text"]))
        if len(samples) == _NUM_SAMPLE_ROWS:
            break
    return tuple(samples)
