"""The table of rows that break what a spec expects, beside the output table.

It is partitioned by `run_id`, and a row in it counts if the output table has its `run_id`. So what
commit puts there first takes effect in the step that publishes the other rows, and what it put
there for an earlier plan ceases to.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from batchllm_operator.lake import RUN_ID, LakeTable, Publication, Snapshot, open_table
from batchllm_operator.spec import JobSpec, TableAddress
from batchllm_operator.spec.expect import UNMET

QUARANTINED_FILE: Final = "quarantined.json"
"""In a plan's folder once commit may have put rows of it there."""


def quarantine_of(spec: JobSpec, output: LakeTable) -> LakeTable:
    """The quarantine table of an output table, in its format; it may not exist yet."""
    address = TableAddress.parse(output.uri).quarantine
    return open_table(address.uri, RUN_ID, spec.output.target_file_bytes)


def quarantine_schema(spec: JobSpec, rows: pa.Schema) -> pa.Schema:
    """Columns beside `run_id`: those of the output, the partition, and what a row doesn't meet."""
    kept = rows.remove(rows.get_field_index(RUN_ID))
    partition = pa.field(spec.input.partition_column, pa.string())
    return kept.append(partition).append(pa.field(UNMET, pa.list_(pa.string())))


def quarantined(
    spec: JobSpec, output: LakeTable, publication: Publication
) -> tuple[LakeTable, Snapshot] | None:
    """The quarantine table with the rows of a publication; None if it has none."""
    if spec.on_unmet != "quarantine":
        return None
    table = quarantine_of(spec, output)
    if table.published(publication.run_id) is None:
        return None
    return table, table.snapshot(publication.run_id)
