"""Which version of which table a run has read and written, and what its columns are made of."""

from typing import Any

from batchllm_operator.lake import Snapshot
from batchllm_operator.stored_plan.counts import Count, Frozen
from batchllm_operator.stored_plan.manifest import PlanManifest


class TableVersion(Frozen):
    """A partition of a table, at one version of it."""

    uri: str
    """The table's address, as in the spec."""
    version: str
    """See `Snapshot.version`."""
    columns: dict[str, str]
    """Arrow types by name; of an input, of the columns that the job reads."""
    num_rows: Count
    num_files: Count | None = None
    num_bytes: Count | None = None


class Lineage(Frozen):
    """Where the rows of a published partition come from."""

    input: TableVersion
    output: TableVersion
    kept: dict[str, str]
    """Columns of the input by their names in the output."""
    answers: dict[str, tuple[str, ...]]
    """Columns of the input by the output columns whose answers are to prompts of them."""

    @classmethod
    def of(cls, manifest: PlanManifest, published: Snapshot) -> "Lineage":
        spec = manifest.spec
        output = TableVersion(
            uri=spec.output.uri,
            version=published.version,
            columns={field.name: str(field.type) for field in published.schema},
            num_rows=published.num_rows,
            num_files=len(published.files),
            num_bytes=sum(file.size_bytes for file in published.files),
        )
        read, answers = input_of(manifest), spec.answer_sources
        return cls(input=read, output=output, kept=spec.kept_columns, answers=answers)


def planned_lineage(manifest: PlanManifest) -> dict[str, Any]:
    """As `Lineage` in JSON, of outputs that aren't published."""
    spec = manifest.spec
    tables = {"input": input_of(manifest).model_dump(), "output": {"uri": spec.output.uri}}
    return {**tables, "kept": spec.kept_columns, "answers": spec.answer_sources}


def input_of(manifest: PlanManifest) -> TableVersion:
    """What the plan has read."""
    return TableVersion(
        uri=manifest.spec.input.uri,
        version=manifest.input_version,
        columns=manifest.input_columns,
        num_rows=manifest.num_rows,
    )
