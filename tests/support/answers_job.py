"""Runs whole jobs with the fake engine, and reads what they have published."""

from pathlib import Path
from typing import Any

from support.fake_job import DS, finish, job_fields

from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec, parse_spec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NEXT = "2026-02-01"
PROPERTIES: dict[str, Any] = {
    "summary": {"type": "string"},
    "count": {"type": "integer"},
    "rating": {"type": ["number", "null"]},
    "urgent": {"type": "boolean"},
    "seen_at": {"type": "string", "format": "date-time"},
    "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    "tags": {"type": "array", "items": {"enum": ["new", "old"]}},
    "person": {"$ref": "#/$defs/person"},
    "rest": {"type": "object"},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
    "$defs": {"person": PERSON},
}
TYPED: dict[str, Any] = {"type": "json_schema", "json_schema": SCHEMA}
"""A response format with a column of each type."""


def asking(folder: Path | str, **changes: Any) -> JobSpec:
    """The spec of a job without sampling; `changes` are of its fields."""
    fields = job_fields(str(folder))
    del fields["sampling"]
    return parse_spec({**fields, **changes}, source="test spec")


def run_and_commit(spec: JobSpec, ds: str = DS) -> StoredPlan:
    plan = plan_job(spec, ds)
    finish(plan)
    return plan


def published(spec: JobSpec, ds: str = DS) -> list[dict[str, Any]]:
    """The rows of the output table: the key `row_key` and the job's own columns."""
    table = open_table(spec.output.uri, spec.input.partition_column)
    rows: list[dict[str, Any]] = []
    for batch in table.scan(table.snapshot(ds), ["row_key", *spec.output_columns]):
        rows += batch.to_pylist()
    return rows
