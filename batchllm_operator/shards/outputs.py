"""The columns of a published table, and the model's name in them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyarrow import types

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.shards.parts import PART_SCHEMA
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN

STATUS_COLUMN: Final = "status"
ERROR_FIELD: Final = pa.field(
    ERROR_COLUMN, pa.struct([("kind", pa.string()), ("message", pa.string())])
)


def output_schema(
    spec: JobSpec,
    rows_schema: pa.Schema,
    table_schema: pa.Schema | None,
    planned: PlannedAnswers,
) -> pa.Schema:
    """Columns of the output table: key, the job's own, carried ones.

    Args:
        spec: the job's.
        rows_schema: holds the key and the carried columns.
        table_schema: the table's columns (`LakeTable.columns`); None if there is no table yet.
        planned: what the plan has found out about the answers.
    """
    own = {field.name: field for field in (*PART_SCHEMA, *Answers.of(spec, planned).fields)}
    names = list(spec.output_columns)
    if _has_status(spec, table_schema):
        own[ERROR_COLUMN] = ERROR_FIELD
        names.insert(names.index(ERROR_COLUMN), STATUS_COLUMN)
    return pa.schema(
        [
            *(rows_schema.field(name).remove_metadata() for name in spec.input.key),
            *(own.get(name, pa.field(name, pa.string())) for name in names),
            *(
                rows_schema.field(name).remove_metadata()
                for name in spec.kept_columns
                if name not in spec.input.key
            ),
        ]
    )


def _has_status(spec: JobSpec, table_schema: pa.Schema | None) -> bool:
    """Whether the table gets `status`, and `error` as a struct; else `error` is a text.

    A table keeps the form that it has. A job that has a use of its own for the name `status`, as
    releases without that column allow, gets the text in every table.
    """
    used = (*spec.kept_columns, *spec.output_columns, spec.input.partition_column)
    if STATUS_COLUMN in map(str.casefold, used):
        return False
    if table_schema is None or ERROR_COLUMN not in table_schema.names:
        return True
    return bool(types.is_struct(table_schema.field(ERROR_COLUMN).type))


def model_name(spec: JobSpec) -> str:
    """The value of the output column `model`: path, and revision if the spec names one."""
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path
