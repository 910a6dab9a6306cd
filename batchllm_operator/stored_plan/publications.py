"""The job's own partitions in its output table."""

from __future__ import annotations

from collections.abc import Iterator

from batchllm_operator.errors import TableError
from batchllm_operator.lake import LakeTable, Publication, before
from batchllm_operator.spec import JobSpec


def check_publisher(table: LakeTable, spec: JobSpec, ds: str) -> Publication | None:
    """The publication of the job that partition `ds` holds; None if there is none.

    Raises:
        TableError: the partition was published by another job, for another partition, or by
            another program.
    """
    found = table.published(ds)
    if found is not None and found.job != spec.name:
        raise TableError(
            f"output {table.uri}: partition {ds!r} holds the outputs of job {found.job!r}; give"
            f" job {spec.name!r} an output table of its own"
        )
    if found is not None and found.partition != ds:
        raise TableError(
            f"output {table.uri}: partition {ds!r} holds the outputs for partition"
            f" {found.partition!r}; move it away or choose another output table"
        )
    return found


def earlier_publications(table: LakeTable, spec: JobSpec, ds: str) -> Iterator[Publication]:
    """The job's publications of partitions before `ds` (see `lake.before`), the latest first."""
    for earlier in reversed(before(table.partitions(), ds)):
        try:
            published = check_publisher(table, spec, earlier)
        except TableError:  # another job's, or another program's
            continue
        if published is not None:
            yield published
