"""The published partition's rows: outputs spread by position, checked, joined with their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import PlanError
from batchllm_operator.lake import Folder, published_schema
from batchllm_operator.pipeline.parts import PART_SCHEMA, PartEntry
from batchllm_operator.pipeline.stored_plan import StoredPlan
from batchllm_operator.planner.plan import ERROR_COLUMN, ROWS_FILE
from batchllm_operator.spec import OUTPUT_COLUMNS, JobSpec

_BUCKET_ROWS: Final = 1 << 16
_MAX_BUCKETS: Final = 256
_SLICE_ROWS: Final = 1 << 13


def _large(field: pa.Field) -> pa.Field:
    """Texts of a whole bucket may be more than the 2 GiB that `string` can address."""
    return field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field


_OUTPUT_FIELDS: Final = [_large(field) for field in PART_SCHEMA if field.name in OUTPUT_COLUMNS]
_BUCKET_SCHEMA: Final = pa.schema([pa.field("row_idx", pa.int64()), *_OUTPUT_FIELDS])


class Outputs(Protocol):
    """Finished outputs of a plan's rows."""

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read these columns of `PART_SCHEMA`, some requests at a time."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard that has all its parts: where they lie, and their ledger."""

    folder: Folder
    entries: Sequence[PartEntry]

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the parts, one at a time."""
        for entry in self.entries:
            with self.folder.open_file(entry.path) as file:
                yield pq.read_table(file, columns=list(columns))


def write_partition(plan: StoredPlan, sources: Sequence[Outputs], spool: Path) -> Path:
    """Write the partition's rows, in input order, to a file in the local folder `spool`.

    Memory holds one bucket of rows, whatever their number (above 16 million rows, buckets
    grow so that there are never more than 256 files).

    Raises:
        PlanError: a row has no output, or more than one.
    """
    spec, manifest = plan.manifest.spec, plan.manifest
    num_rows = manifest.counts.num_rows
    bucket_rows = max(_BUCKET_ROWS, -(-num_rows // _MAX_BUCKETS))
    buckets = _spread(sources, num_rows, bucket_rows, spool)
    constants = {"model": model_name(spec), "run_id": plan.publication.run_id}
    data = spool / "data.parquet"
    with plan.open_file(ROWS_FILE) as file:
        rows_file = pq.ParquetFile(file)
        schema = published_schema(output_schema(spec, rows_file.schema_arrow), plan.publication)
        with pq.ParquetWriter(data, schema, compression="zstd") as writer:
            row_idx = 0
            for rows, bucket in zip(_rebatch(rows_file, bucket_rows), buckets, strict=True):
                for table in _join(rows, _read_bucket(bucket), row_idx, constants, schema):
                    writer.write_table(table)
                row_idx += rows.num_rows
    return data


def _spread(sources: Sequence[Outputs], num_rows: int, bucket_rows: int, spool: Path) -> list[Path]:
    """Spread the outputs, one for each row, into files of neighbouring row_idx."""
    paths = [spool / f"bucket-{idx}" for idx in range(-(-num_rows // bucket_rows))]
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(path, _BUCKET_SCHEMA)) for path in paths]
        for source in sources:
            for part in source.parts(PART_SCHEMA.names):
                for outputs in _one_per_row(part):
                    bucket_idxs = outputs["row_idx"].to_numpy() // bucket_rows
                    for bucket_idx in np.unique(bucket_idxs):
                        if not 0 <= bucket_idx < len(writers):
                            raise PlanError(f"a part answers a row beyond the plan's {num_rows}")
                        chosen = outputs.filter(bucket_idxs == bucket_idx)
                        writers[bucket_idx].write_table(chosen)
    return paths


def _one_per_row(part: pa.Table) -> Iterator[pa.Table]:
    """The outputs of a part's requests, repeated for each row that a request stands for.

    In slices, as one request may stand for millions of rows. A row that only shares
    another's output had nothing computed: all its prompt is cached.
    """
    row_idxs = part["row_idxs"].combine_chunks()
    request = pc.list_parent_indices(row_idxs).to_numpy()
    rows = pc.list_flatten(row_idxs)
    is_repeat = np.zeros(len(request), dtype=bool)
    is_repeat[1:] = request[1:] == request[:-1]
    columns = part.select([field.name for field in _OUTPUT_FIELDS]).cast(pa.schema(_OUTPUT_FIELDS))
    for start in range(0, len(request), _SLICE_ROWS):
        chosen = slice(start, start + _SLICE_ROWS)
        table = columns.take(pa.array(request[chosen]))
        table = table.add_column(0, "row_idx", rows[chosen])
        cached = pc.if_else(
            pa.array(is_repeat[chosen]), table["num_prompt_tokens"], table["num_cached_tokens"]
        )
        position = table.schema.get_field_index("num_cached_tokens")
        yield table.set_column(position, "num_cached_tokens", cached).cast(_BUCKET_SCHEMA)


def _rebatch(rows_file: pq.ParquetFile, bucket_rows: int) -> Iterator[pa.Table]:
    """The rows in tables of exactly `bucket_rows`, the last one shorter."""
    kept: list[pa.RecordBatch] = []
    num_kept = 0
    for batch in rows_file.iter_batches(batch_size=min(bucket_rows, _BUCKET_ROWS)):
        while num_kept + batch.num_rows >= bucket_rows:
            head = batch.slice(0, bucket_rows - num_kept)
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
) -> Iterator[pa.Table]:
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
    outputs = outputs.drop_columns("row_idx")  # a name that a key may have, too
    for first in range(0, rows.num_rows, _SLICE_ROWS):
        chosen = slice(first, first + _SLICE_ROWS)
        some = rows.slice(first, _SLICE_ROWS)
        joined = outputs.take(pa.array(place[chosen], mask=~prompted[chosen]))
        columns = {name: joined[name] for name in joined.column_names}
        columns[ERROR_COLUMN] = pc.coalesce(
            some[ERROR_COLUMN].cast(pa.large_string()), joined[ERROR_COLUMN]
        )
        for name, value in constants.items():
            columns[name] = pa.repeat(value, some.num_rows)
        for name in some.column_names:
            columns.setdefault(name, some[name])
        yield pa.table([columns[field.name].cast(field.type) for field in schema], schema=schema)


def output_schema(spec: JobSpec, rows_schema: pa.Schema) -> pa.Schema:
    """Columns of the output table: key, the job's own, carried ones.

    Args:
        spec: the job.
        rows_schema: holds the key and the carried columns.
    """
    own = {field.name: field for field in PART_SCHEMA}
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


def model_name(spec: JobSpec) -> str:
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path
