"""The commit stage: every row checked, then the partition replaced in one step."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import FailedRowsError, IncompleteRunError, PlanError, TableError
from batchllm_operator.lake import Folder, LakeTable, open_table
from batchllm_operator.lake.parquet import METADATA_PREFIX
from batchllm_operator.pipeline.parts import PART_SCHEMA, PartEntry, read_ledger
from batchllm_operator.pipeline.run import REPORT_FILE, ShardReport
from batchllm_operator.pipeline.stored_plan import StoredPlan, job_folder
from batchllm_operator.planner import saving_ratio
from batchllm_operator.planner.plan import ERROR_COLUMN, ROWS_FILE, PlanManifest
from batchllm_operator.report import RunReport, SampleRow
from batchllm_operator.spec import OUTPUT_COLUMNS, JobSpec

_log = logging.getLogger(__name__)
_BUCKET_ROWS: Final = 1 << 16
_NUM_SAMPLE_ROWS: Final = 3

_OUTPUT_FIELDS: Final = [field for field in PART_SCHEMA if field.name in OUTPUT_COLUMNS]
_BUCKET_SCHEMA: Final = pa.schema([pa.field("row_idx", pa.int64()), *_OUTPUT_FIELDS])


@dataclass(frozen=True, slots=True)
class _Shard:
    """A finished shard: where its parts lie, and their ledger."""

    folder: Folder
    entries: Sequence[PartEntry]

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for entry in self.entries:
            with self.folder.open_file(entry.file) as file:
                yield pq.read_table(file, columns=list(columns))


def commit_run(plan_uri: str) -> RunReport:
    """Publish the outputs of a finished plan, all rows or nothing.

    Committing again what is already published changes nothing.

    Raises:
        PlanError: the plan is absent, corrupted or of another version, or its parts don't
            answer each row once.
        IncompleteRunError: parts are missing; names the shards to run.
        FailedRowsError: more rows failed than the spec allows.
        TableError: the output partition holds somebody else's data.
    """
    plan = StoredPlan.open(plan_uri)
    manifest = plan.manifest
    spec = manifest.spec
    table = open_table(spec.output.uri, spec.input.partition_column)
    shards = _finished_shards(plan)
    published = table.published_metadata(manifest.ds)
    if published is not None and published.get("plan_id") == manifest.plan_id:
        _log.info("partition %s already holds the outputs of this plan", manifest.ds)
        return _write_report(plan, table, shards, _count_errors(plan, shards))
    errors = _count_errors(plan, shards)
    _check_failed_fraction(spec, manifest, errors)
    with tempfile.TemporaryDirectory(prefix="batchllm-commit-") as spool:
        data = Path(spool) / "data.parquet"
        metadata = {"plan_id": manifest.plan_id, "run_id": manifest.run_id}
        _build_partition(plan, shards, Path(spool), data, metadata)
        table.publish(manifest.ds, data, metadata)
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
        TableError: nothing is published there.
    """
    table = open_table(spec.output.uri, spec.input.partition_column)
    metadata = table.published_metadata(ds)
    if metadata is None:
        raise TableError(f"table {table.uri}: partition {ds!r} has not been published")
    return job_folder(spec, ds).child(f"plan-{metadata['plan_id']}").uri


def _finished_shards(plan: StoredPlan) -> list[_Shard]:
    shards, unfinished = [], []
    for shard_idx, shard in enumerate(plan.manifest.shards):
        folder = plan.run_folder(shard_idx)
        entries = read_ledger(folder)
        if set(entries) != set(range(shard.num_parts)):
            unfinished.append(f"shard {shard_idx} ({len(entries)} of {shard.num_parts} parts)")
        shards.append(_Shard(folder, list(entries.values())))
    if unfinished:
        raise IncompleteRunError(
            f"plan {plan.folder.uri}: unfinished: {', '.join(unfinished)}; run"
            " `batchllm run --plan ... --shard I` for these, then commit again"
        )
    return shards


def _count_errors(plan: StoredPlan, shards: Sequence[_Shard]) -> Counter[str]:
    """Failed rows by kind: what stands before the colon of an error."""
    kinds: Counter[str] = Counter()
    with plan.open_file(ROWS_FILE) as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=[ERROR_COLUMN]):
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


def _build_partition(
    plan: StoredPlan, shards: Sequence[_Shard], spool: Path, data: Path, metadata: dict[str, str]
) -> None:
    """Write the partition's rows, in input order, to the local file `data`."""
    spec, manifest = plan.manifest.spec, plan.manifest
    num_rows = manifest.counts.num_rows
    buckets = _spread(shards, num_rows, spool)
    constants = {"model": _model_name(spec), "run_id": manifest.run_id}
    with plan.open_file(ROWS_FILE) as file:
        rows_file = pq.ParquetFile(file)
        schema = _output_schema(spec, rows_file.schema_arrow).with_metadata(
            {f"{METADATA_PREFIX}{key}": value for key, value in metadata.items()}
        )
        with pq.ParquetWriter(data, schema, compression="zstd") as writer:
            row_idx = 0
            for rows, bucket in zip(_rebatch(rows_file), buckets, strict=True):
                outputs = _read_bucket(bucket)
                writer.write_table(_join(rows, outputs, row_idx, constants, schema))
                row_idx += rows.num_rows
    if row_idx != num_rows:
        raise PlanError(f"plan {plan.folder.uri}: {ROWS_FILE} has {row_idx} rows, not {num_rows}")


def _spread(shards: Sequence[_Shard], num_rows: int, spool: Path) -> list[Path]:
    """Spread the outputs, one for each row, into files of neighbouring row_idx."""
    paths = [spool / f"bucket-{idx}" for idx in range(-(-num_rows // _BUCKET_ROWS))]
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(path, _BUCKET_SCHEMA)) for path in paths]
        for part in itertools.chain.from_iterable(
            shard.parts(PART_SCHEMA.names) for shard in shards
        ):
            outputs = _one_per_row(part)
            bucket_idxs = outputs["row_idx"].to_numpy() // _BUCKET_ROWS
            for bucket_idx in np.unique(bucket_idxs):
                if not 0 <= bucket_idx < len(writers):
                    raise PlanError(f"a part answers a row beyond the plan's {num_rows}")
                writers[bucket_idx].write_table(outputs.filter(bucket_idxs == bucket_idx))
    return paths


def _one_per_row(part: pa.Table) -> pa.Table:
    """The outputs of a part's requests, repeated for each row that a request stands for.

    A row that only shares another's output had nothing computed: all its prompt is cached.
    """
    part = part.combine_chunks()
    row_idxs = part["row_idxs"].combine_chunks()
    request = pc.list_parent_indices(row_idxs)
    rows = part.select([field.name for field in _OUTPUT_FIELDS]).take(request)
    rows = rows.add_column(0, "row_idx", pc.list_flatten(row_idxs))
    request_idxs = request.to_numpy()
    is_repeat = np.concatenate([[False], request_idxs[1:] == request_idxs[:-1]])[
        : len(request_idxs)
    ]
    cached = pc.if_else(pa.array(is_repeat), rows["num_prompt_tokens"], rows["num_cached_tokens"])
    position = rows.schema.get_field_index("num_cached_tokens")
    return rows.set_column(position, "num_cached_tokens", cached).cast(_BUCKET_SCHEMA)


def _rebatch(rows_file: pq.ParquetFile) -> Iterator[pa.Table]:
    """The rows in tables of exactly `_BUCKET_ROWS`, the last one shorter."""
    kept: list[pa.RecordBatch] = []
    num_kept = 0
    for batch in rows_file.iter_batches(batch_size=_BUCKET_ROWS):
        while num_kept + batch.num_rows >= _BUCKET_ROWS:
            head = batch.slice(0, _BUCKET_ROWS - num_kept)
            yield pa.Table.from_batches([*kept, head])
            batch = batch.slice(head.num_rows)
            kept, num_kept = [], 0
        if batch.num_rows:
            kept.append(batch)
            num_kept += batch.num_rows
    if kept:
        yield pa.Table.from_batches(kept)


def _read_bucket(path: Path) -> pa.Table:
    with pa.ipc.open_stream(path) as reader:
        return reader.read_all().sort_by("row_idx")


def _join(
    rows: pa.Table, outputs: pa.Table, start: int, constants: dict[str, str], schema: pa.Schema
) -> pa.Table:
    """Put each row's output beside it; rows that couldn't be prompted have none.

    Raises:
        PlanError: a row has no output, or more than one.
    """
    prompted = rows[ERROR_COLUMN].is_null().to_numpy()
    expected = np.flatnonzero(prompted) + start
    found = outputs["row_idx"].to_numpy()
    if not np.array_equal(expected, found):
        repeated = found[1:][found[1:] == found[:-1]]
        wrong = repeated if len(repeated) else np.setxor1d(expected, found)
        raise PlanError(
            f"row {wrong[0]} has {np.count_nonzero(found == wrong[0])} outputs where the plan"
            f" wants {np.count_nonzero(expected == wrong[0])}; {len(wrong)} such rows; nothing was"
            " published"
        )
    place = np.cumsum(prompted) - 1
    joined = outputs.take(pa.array(place, mask=~prompted))
    columns = {name: joined[name] for name in joined.column_names}
    columns[ERROR_COLUMN] = pc.coalesce(rows[ERROR_COLUMN], joined[ERROR_COLUMN])
    for name, value in constants.items():
        columns[name] = pa.repeat(value, rows.num_rows)
    for name in rows.column_names:
        columns.setdefault(name, rows[name])
    return pa.table([columns[field.name] for field in schema], schema=schema)


def _output_schema(spec: JobSpec, rows_schema: pa.Schema) -> pa.Schema:
    """Key, the job's own columns, carried columns."""
    own = {field.name: field for field in _OUTPUT_FIELDS}
    return pa.schema(
        [
            *(rows_schema.field(name).remove_metadata() for name in spec.input.key),
            *(own.get(name, pa.field(name, pa.string())) for name in OUTPUT_COLUMNS),
            *(
                rows_schema.field(name).remove_metadata()
                for name in spec.kept_columns
                if name not in spec.input.key
            ),
        ]
    )


def _model_name(spec: JobSpec) -> str:
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path


def _write_report(
    plan: StoredPlan, table: LakeTable, shards: Sequence[_Shard], errors: Counter[str]
) -> RunReport:
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
        model=_model_name(spec),
        num_rows_in=counts.num_rows,
        num_rows_out=counts.num_rows - errors.total(),
        num_rows_failed=errors.total(),
        num_rows_duplicate=counts.num_duplicate_rows,
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
