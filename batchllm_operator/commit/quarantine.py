"""Divides the rows of a partition by whether they break what a spec expects."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.answers.expectations import Measured, watched_column
from batchllm_operator.lake import LakeTable, gather, write_files
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.shards.quarantine import quarantine_schema
from batchllm_operator.spec.expect import UNMET
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_BATCH_ROWS: Final = 1 << 14


def read_rows(data: Path, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Rows of local files, in order."""
    for path in files_of(data):
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=columns)


def divide(
    plan: StoredPlan, table: LakeTable, data: Path, unmet: Sequence[Measured]
) -> tuple[Path, Path]:
    """Write the rows of local files that break no bound, and those for quarantine, beside them."""
    spec, schema = plan.manifest.spec, pq.read_schema(files_of(data)[0])
    columns = [watched_column(spec, each.column, schema) for each in unmet]
    names = np.array([f"{each.column}: {each.what}" for each in unmet], dtype=np.object_)

    def chosen(wanted: pa.Schema, *, at_fault: bool) -> Iterator[pa.Table]:
        for batch in read_rows(data):
            faults = np.zeros((batch.num_rows, len(unmet)), dtype=np.bool_)
            for idx, (column, each) in enumerate(zip(columns, unmet, strict=True)):
                faults[:, idx] = column.at_fault(batch, each)
            is_chosen = faults.any(axis=1) == at_fault
            rows = batch.filter(pa.array(is_chosen))
            fields: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
            if at_fault:
                fields[spec.input.partition_column] = pa.repeat(plan.manifest.ds, rows.num_rows)
                broken = [names[row].tolist() for row in faults[is_chosen]]
                fields[UNMET] = pa.array(broken, wanted.field(UNMET).type)
            yield pa.table([fields[name] for name in wanted.names], wanted)

    most, folders = table.most_file_bytes, (data.with_name("kept"), data.with_name("at-fault"))
    for folder, wanted in zip(folders, (schema, quarantine_schema(spec, schema)), strict=True):
        rows = chosen(wanted, at_fault=folder is folders[1])
        write_files(gather(rows, most), folder, wanted, most)
    return folders


def num_rows(data: Path) -> int:
    """Rows of local files."""
    return sum(int(pq.read_metadata(file).num_rows) for file in files_of(data))
