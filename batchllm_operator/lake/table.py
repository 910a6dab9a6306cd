"""What the job needs of a lake table, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchllm_operator.spec import FilterTerm


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a snapshot."""

    name: str
    """Path relative to the table's root."""
    size_bytes: int
    num_rows: int
    version: str
    """What changes when the content does: an ETag, or a digest of the Parquet footer."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One partition as it stood when it was looked at."""

    partition: str
    files: tuple[InputFile, ...]
    schema: pa.Schema
    """Columns of the partition, the partition columns (strings) included."""


class LakeTable(Protocol):
    """A table partitioned by one column; implementations pass one behaviour suite."""

    @property
    def uri(self) -> str:
        """Where the table lies."""
        ...

    def partitions(self) -> list[str]:
        """Names of the partitions that there are, ascending; none if there is no table."""
        ...

    def snapshot(self, partition: str) -> Snapshot:
        """Describe the partition's present content; no files if the table lacks the partition.

        Equal snapshots before and after a scan mean that it read one state of the partition.

        Raises:
            TableError: there is no table, it isn't partitioned by the column, or a file
                can't be read.
        """
        ...

    def scan(
        self, snapshot: Snapshot, columns: Sequence[str], conditions: Sequence[FilterTerm] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Stream the rows that meet all conditions, in an order that never changes.

        Raises:
            TableError: a column is unknown, or can't be compared as a condition asks.
        """
        ...

    def published_metadata(self, partition: str) -> Mapping[str, str] | None:
        """What the published partition's schema was marked with; None if nothing is published.

        Raises:
            TableError: the partition holds data that wasn't published by this package.
        """
        ...

    def publish(self, partition: str, data: Path) -> None:
        """Replace the partition by the local Parquet file `data`, in one step.

        Readers see the old or the new rows, never a mixture. The file's own metadata
        (`published_schema`) says what it is.

        Raises:
            TableError: the partition holds data that wasn't published by this package.
        """
        ...
