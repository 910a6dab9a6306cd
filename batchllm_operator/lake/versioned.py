"""Tables with a log of versions: data files are put beside the table's, then one commit adds them.

version = _latest() -> _pin(version, partition): Snapshot -> whose rows it holds
        -> _change(version, ...): Change -> staging().put(rows) -> commit(files)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.publishing import RUN_ID, Publication, RefusedCommit, check_name
from batchllm_operator.lake.schema import StoredColumns
from batchllm_operator.lake.staging import StagedFile, StagedRows, Staging
from batchllm_operator.lake.table import LakeTable, Snapshot

Version = TypeVar("Version")


class Change(ABC, Generic[Version]):
    """The replacement of one partition by rows of some columns, on top of one version."""

    staging: Staging
    """To put data files beside the table's."""

    @abstractmethod
    def rehearse(self) -> None:
        """Raise `TableError` if the format's library would refuse the commit."""

    @abstractmethod
    def commit(self, files: Sequence[StagedFile], publication: Publication) -> RefusedCommit | None:
        """See `Attempt.commit`."""

    def is_in(self, version: Version) -> bool:
        """Whether a version's history tells that the commit has happened."""
        return False


class VersionedTable(LakeTable, Generic[Version]):
    """A table whose versions are files and metadata; None stands for no table."""

    most_file_bytes: int

    @abstractmethod
    def _latest(self) -> Version | None:
        """The newest version."""

    def _create(self, columns: pa.Schema) -> Version | None:
        """Create the table for such rows, unless its first commit does that."""
        return None

    @abstractmethod
    def _pin(self, version: Version, partition: str) -> Snapshot:
        """A partition in a version; raises as `snapshot`."""

    @abstractmethod
    def _change(
        self, version: Version | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Change[Version]:
        """Raises `TableError` where the table doesn't accept such rows."""

    def snapshot(self, partition: str) -> Snapshot:
        version = self._latest()
        if version is None:
            raise TableError(
                f"table {self.uri}: there is no such table; check its address, or write the table"
                " first"
            )
        snapshot = self._pin(version, partition)
        files = list(snapshot.files)
        for name, value in self.outer.items():
            if not all(name in file.values for file in files):
                raise TableError(f"table {self.uri}: isn't partitioned by the values of {name!r}")
            files = [file for file in files if str(file.values[name]) == value]
        columns = snapshot.schema, self.partition_column, snapshot.in_files
        chosen = Snapshot.of(partition, snapshot.version, files, *columns)
        return replace(chosen, conditions=snapshot.conditions)

    def published(self, partition: str) -> Publication | None:
        return self._published_in(self._latest(), partition)

    def _published_in(self, version: Version | None, partition: str) -> Publication | None:
        if version is None:
            return None
        snapshot = self._pin(version, partition)
        columns = [RUN_ID] if RUN_ID in snapshot.schema.names else []
        run_ids: set[Any] = set()
        for batch in self.scan(snapshot, columns):
            run_ids |= _values(batch.column(0)) if columns else {None}
            if len(run_ids) > 1:
                break
        if not run_ids:
            return None
        run_id = run_ids.pop()
        if isinstance(run_id, str) and not run_ids:
            publication = Publication.of_run_id(run_id)
            if publication is not None and self.partition_of(publication) == partition:
                return publication
        why = f"it is {run_id!r} in" if columns else "there is no column"
        raise TableError(
            f"output {self.uri}: partition {partition!r} holds rows that no job of this package"
            " wrote; move them away or choose another output table"
            f" ({'there are several values of' if run_ids else why} {RUN_ID!r})"
        )

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        check_name(self.uri, partition)
        change = self._change(self._latest(), partition, columns, add_columns=add_columns)
        change.rehearse()
        return change.staging.stored

    def staging(self, partition: str, columns: pa.Schema, *, add_columns: bool = False) -> Staging:
        """To write data files elsewhere than in the process that publishes.

        A table that doesn't exist may be created for it. Raises as `check_outputs`.
        """
        self.check_outputs(partition, columns, add_columns=add_columns)
        version = self._latest() or self._create(columns)
        return self._change(version, partition, columns, add_columns=add_columns).staging

    def _attempt(
        self, publication: Publication, data: Path | StagedRows, add_columns: bool
    ) -> AbstractContextManager[_Attempt]:
        return closing(_Attempt(self, publication, data, add_columns))


@dataclass
class _Attempt:
    """See `publishing.Attempt`.

    Data files are put once for all commits that are tried. They are removed when no version can
    refer to them, so not while the outcome of a commit is unknown.
    """

    table: VersionedTable[Any]
    publication: Publication
    data: Path | StagedRows
    add_columns: bool

    def __post_init__(self) -> None:
        self._is_ours = isinstance(self.data, Path)
        if isinstance(self.data, StagedRows):
            self._columns = self.data.staging.schema
        else:
            self._columns = pq.read_schema(files_of(self.data)[0])
        self._tried: list[Change[Any]] = []  # any may be in the table
        self._may_be_referred_to = False

    def look(self) -> Publication | None:
        # Another writer may create the table first: what it holds then is looked at below.
        self._version = self.table._latest() or self.table._create(self._columns)
        if any(self._version and change.is_in(self._version) for change in self._tried):
            return self.publication
        return self.table._published_in(self._version, self.table.partition_of(self.publication))

    def commit(self) -> RefusedCommit | None:
        partition = self.table.partition_of(self.publication)
        change = self.table._change(
            self._version, partition, self._columns, add_columns=self.add_columns
        )
        if not isinstance(self.data, StagedRows):
            self.data = StagedRows(change.staging, tuple(change.staging.put(self.data)))
        self.data.staging.check_unchanged(change.staging)
        self._tried.append(change)
        before, self._may_be_referred_to = self._may_be_referred_to, True
        refused = change.commit(self.data.files, self.publication)
        if refused is not None and refused.is_certain:
            self._may_be_referred_to = before
            return replace(refused, may_arrive=before)
        return refused

    def close(self) -> None:
        if self._is_ours and isinstance(self.data, StagedRows) and not self._may_be_referred_to:
            self.data.staging.remove([file.name for file in self.data.files])


def _values(column: pa.Array) -> set[Any]:
    """The column's distinct values; bytes if another program wrote one that isn't UTF-8."""
    distinct = column.unique()
    try:
        return set(distinct.to_pylist())
    except UnicodeDecodeError:
        return set(distinct.cast(pa.binary()).to_pylist())
