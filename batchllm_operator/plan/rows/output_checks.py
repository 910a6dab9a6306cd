"""Checks of a job's output, before anything is generated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.engine import check_format
from batchllm_operator.errors import SpecError, TableError
from batchllm_operator.lake import LakeTable, Snapshot, StoredColumns, check_names
from batchllm_operator.shards.outputs import STATUS_COLUMN, output_schema
from batchllm_operator.spec import JobSpec, TableAddress
from batchllm_operator.storage import Folder, check_conditional_writes
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN
from batchllm_operator.stored_plan.stored_plan import job_folder

_NEVER_NULL: Final = frozenset({STATUS_COLUMN, "model", "run_id"})


def check_response_format(spec: JobSpec, output: LakeTable) -> None:
    """Check that a schema's properties can be columns of the output, and that the engine takes it.

    Raises:
        SpecError: names the property, or gives vLLM's reason.
    """
    if spec.response_format is None:
        return
    try:
        check_names(f"table {output.uri}", Answers.of(spec).fields, output.forbidden_in_names)
    except TableError as error:
        raise SpecError(f"response_format: {error}") from error
    check_format(spec)


def check_columns_fit(
    spec: JobSpec,
    ds: str,
    snapshot: Snapshot,
    output: LakeTable,
    planned: PlannedAnswers,
) -> StoredColumns:
    """Check that the output table takes the job's columns; returns them as it stores them.

    Raises:
        TableError: see `LakeTable.check_outputs`; or rows that fail would have nulls where the
            table allows none.
    """
    columns = output_schema(spec, snapshot.schema, planned)
    stored = output.check_outputs(ds, columns, add_columns=spec.output.add_columns)
    for name in set(spec.output_columns) & set(stored.schema.names) - _NEVER_NULL:
        if stored.schema.field(name).nullable:
            continue
        if name == ERROR_COLUMN or spec.max_failed_fraction:
            rows = "rows that don't fail" if name == ERROR_COLUMN else "rows that fail"
            raise TableError(
                f"{stored.where}: column {name!r} may not be null, but {rows} have no value there;"
                " let it be null in the table"
                + ("" if name == ERROR_COLUMN else ", or set max_failed_fraction to 0")
            )
    return stored


def check_apart(spec: JobSpec) -> None:
    """Raise SpecError if input and output overlap."""
    if TableAddress.parse(spec.input.uri).overlaps(TableAddress.parse(spec.output.uri)):
        raise SpecError(
            f"output.uri: {spec.output.uri} and the input table {spec.input.uri} must be apart:"
            " one would be read or overwritten as a part of the other"
        )


def check_folders(spec: JobSpec, ds: str) -> None:
    """Check the folders of outputs and plans.

    Raises:
        SpecError: a local file is in the place of one.
        StorageError: the S3 store of plans can't keep claims apart.
    """
    table = TableAddress.parse(spec.output.uri).folder
    folders = [("output.uri", Folder.open(table))] if table is not None else []
    staging = "output.uri" if spec.output.staging_uri is None else "output.staging_uri"
    for field, folder in [*folders, (staging, job_folder(spec, ds))]:
        if not folder.is_local:
            continue
        path = Path(folder.path)
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not there.is_dir():
            raise SpecError(f"{field}: {there} isn't a folder; choose another place")
    check_conditional_writes(job_folder(spec, ds), "IfNoneMatch")
