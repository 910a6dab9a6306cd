"""The interface of a lake table, in any format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.spec import FilterTerm


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a snapshot."""

    name: str
    """Path relative to the table's root."""
    size_bytes: int
    num_rows: int
    version: str
    """Changes with the content: an ETag, a digest of the Parquet footer, `modified:<ms>` for Delta,
    `immutable` for Iceberg."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Neighbouring row groups of a snapshot's file."""

    file: InputFile
    row_groups: tuple[int, int] | None = None
    """Half-open; None for the whole file."""
    first_row: int = 0
    """Rows of the file before them."""
    size_bytes: int = 0
    """About their size in the file."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One partition at one version of its table."""

    partition: str
    version: str
    """The table's state: `iceberg:<snapshot id>/<schema id>` (`iceberg:none/...` before the first
    snapshot), `delta:<version>` or `listing:<digest>`; a plan records it. Equal versions have equal
    content."""
    files: tuple[InputFile, ...]
    schema: pa.Schema
    """Columns of the partition, including the partition columns."""
    outer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the partition columns before this one in the table's layout, in the partition's
    files: `year` and `month` where the partition is a `day` below them."""
    inner: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those of the partition columns after this one."""

    @property
    def num_rows(self) -> int:
        """Rows of all files; an upper bound where rows were deleted one by one."""
        return sum(file.num_rows for file in self.files)


@dataclass(frozen=True, slots=True)
class Publication:
    """The job and plan whose outputs a partition of an output table holds."""

    job: str
    partition: str
    plan_id: str

    @property
    def run_id(self) -> str:
        """The value of column `run_id` in each of its rows."""
        return f"{self.job}/{self.partition}/{self.plan_id}"

    @property
    def properties(self) -> dict[str, str]:
        """Stored with the commit in the table's history."""
        fields = {"job": self.job, "partition": self.partition, "plan-id": self.plan_id}
        return {f"batchllm.{name}": value for name, value in fields.items()}

    @classmethod
    def of_run_id(cls, run_id: str | None) -> Publication | None:
        """The publication that a row's `run_id` names; None if no job of ours wrote it.

        A job's name and a plan's id contain no `/`; a partition's name may.
        """
        job, _, rest = (run_id or "").partition("/")
        partition, _, plan_id = rest.rpartition("/")
        return cls(job, partition, plan_id) if job and partition and plan_id else None


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of a partition in data files that no version of the table refers to yet."""

    schema: pa.Schema
    """Columns of the rows, as they were given."""
    stored: pa.Schema
    """The same columns as the files have them; a later version may want others."""
    files: tuple[str, ...]
    """What the format needs to know of each file, as JSON, in row order."""


class Staging(Protocol):
    """Puts data files beside those of a table, in any process: it can be sent to one."""

    def put(self, data: Path, number: int) -> list[str]:
        """Put the rows of local files into the table's folder; returns `StagedRows.files`.

        `data` is as for `LakeTable.publish`; names sort by `number` first. What isn't published is
        left to the table's vacuum.

        Raises:
            TableError: a value doesn't fit the table.
            StorageError: the storage fails.
        """

    def rows(self, files: Sequence[str]) -> StagedRows:
        """What `LakeTable.publish` takes, from what all `put` returned, in row order."""


class LakeTable(Protocol):
    """A table partitioned by one column; implementations pass one behaviour suite."""

    @property
    def uri(self) -> str:
        """The table's address, as in a spec."""

    @property
    def most_file_bytes(self) -> int | None:
        """Upper bound of a data file; None if a partition is one file of any size."""

    @property
    def forbidden_in_names(self) -> str:
        """Characters that the format doesn't allow in names of columns."""

    def partitions(self) -> list[str]:
        """Names of the partitions, as `in_order` has them; none if there is no table."""

    def snapshot(self, partition: str) -> Snapshot:
        """Pin the partition's current content; no files if the table lacks the partition.

        Raises:
            TableError: there is no table, it isn't partitioned by the column, or a file
                can't be read.
        """

    def scan(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm] = (),
        part: FilePart | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Stream the snapshot's rows that meet all conditions, always in the same order.

        Later commits lead to an error at most, never to other rows. With `part`, only its rows; of
        the snapshot's files, one is enough then, and `check_unchanged` is left to the caller.

        Raises:
            TableError: a column is unknown, its type doesn't allow a condition's comparison, or the
                snapshot is gone.
        """

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        """The Parquet footer of one of the snapshot's files.

        Raises:
            TableError: the file is gone or damaged.
        """

    def check_unchanged(self, snapshot: Snapshot) -> None:
        """Check that what was read since the snapshot was taken is the snapshot.

        Raises:
            StorageError: files were replaced meanwhile, in a format that allows it.
        """

    def published(self, partition: str) -> Publication | None:
        """The partition's publication; None if it has no rows, or there is no table.

        Raises:
            TableError: the partition holds rows that no job of this package wrote.
        """

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        """Refuse what `publish` would refuse, as far as the rows' columns tell.

        The returned columns check the rows' values.

        Args:
            partition: the one to publish.
            columns: all but the partition column.
            add_columns: whether columns that the table lacks may be added to it.

        Raises:
            TableError: the table's schema, partitioning or protocol doesn't accept such rows.
            StorageError: the storage can't keep concurrent commits apart.
        """

    def staging(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> Staging | None:
        """To write data files elsewhere than in the process that publishes.

        None if a partition is one file. A table that doesn't exist may be created for it.

        Raises:
            TableError: as `check_outputs`.
        """

    def publish(
        self,
        publication: Publication,
        data: Path | StagedRows,
        *,
        replaces: Publication | None,
        add_columns: bool = False,
    ) -> None:
        """Replace the partition by the rows of local Parquet files, in one step.

        Readers see the old or the new rows, never a mixture. Publishing the same rows again changes
        nothing.

        Args:
            publication: that of the rows; their column `run_id` names it.
            data: a file, or a folder of files whose names sort in row order; all columns but the
                partition column, in the table's order when it is new. Or staged rows.
            replaces: what `published` returned when the caller decided to publish.
            add_columns: whether columns that the table lacks may be added to it.

        Raises:
            ConflictError: the partition no longer holds `replaces`: another client has published.
            CommitUnknownError: the outcome is unknown; the commit may have happened.
            TableError: the table's schema or partitioning doesn't accept these rows, or the
                partition holds rows that no job of this package wrote.
            StorageError: the storage or the catalog fails; nothing was published.
        """
