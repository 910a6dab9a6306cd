"""The columns of a published table, and the model's name in them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from batchllm_operator.answers import Answers, PlannedAnswers
from batchllm_operator.shards.parts import PART_SCHEMA
from batchllm_operator.spec import JobSpec

STATUS_COLUMN: Final = "status"


def output_schema(spec: JobSpec, rows_schema: pa.Schema, planned: PlannedAnswers) -> pa.Schema:
    """Columns of the output table: key, the job's own, carried ones.

    Args:
        spec: the job's.
        rows_schema: holds the key and the carried columns.
        planned: what the plan has found out about the answers.
    """
    own = {field.name: field for field in (*PART_SCHEMA, *Answers.of(spec, planned).fields)}
    return pa.schema(
        [
            *(rows_schema.field(name).remove_metadata() for name in spec.input.key),
            *(own.get(name, pa.field(name, pa.string())) for name in spec.output_columns),
            *(
                rows_schema.field(name).remove_metadata()
                for name in spec.kept_columns
                if name not in spec.input.key
            ),
        ]
    )


def model_name(spec: JobSpec) -> str:
    """The value of the output column `model`: path, and revision if the spec names one."""
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path
