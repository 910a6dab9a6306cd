"""Data files to add to Delta tables, and their statistics in the log."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.data_files import files_of, fit, row_groups, write_files
from batchllm_operator.lake.delta.schema import FILE_PREFIX
from batchllm_operator.lake.publishing import StagedRows, Staging
from batchllm_operator.lake.schema import plain_type
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.storage.folder import Folder

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_MOST_STATISTIC_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class DeltaStaging(Staging):
    """See `Staging`."""

    folder_uri: str
    subfolder: str
    partition_values: Mapping[str, str]
    most_file_bytes: int
    write_id: str

    def put(self, data: Path, number: int) -> list[str]:
        folder, prefix = Folder.open(self.folder_uri), f"{self.write_id}-{number:06d}-"
        outputs = OutputFiles(folder, self.subfolder, data, self.most_file_bytes, prefix)
        actions = outputs.put(self.uri, self.stored, self.partition_values)
        return [json.dumps(asdict(action)) for action in actions]


class OutputFiles:
    """Rows to publish, as data files in the table's folder that no version refers to yet.

    They are written once for all commits that are tried, unless the table's types change.
    """

    def __init__(
        self,
        folder: Folder,
        subfolder: str,
        data: Path | StagedRows,
        most_file_bytes: int,
        prefix: str = "",
    ) -> None:
        """`data` is as for `LakeTable.publish`; staged rows are in the table's folder already.

        Files are put into the table's `subfolder`. Names begin with `prefix`, so that those of
        several such puts sort in row order, too. A file has at most `most_file_bytes`, unless one
        row has more.
        """
        self._staged = data if isinstance(data, StagedRows) else None
        self._data = [] if isinstance(data, StagedRows) else files_of(data)
        self.schema = self._staged.schema if self._staged else pq.read_schema(self._data[0])
        self.may_be_committed = False
        """Whether a version may refer to the files; if so, they are never removed."""
        self._folder = folder
        self._stem = f"{subfolder}/{FILE_PREFIX}{prefix}"
        self._most_file_bytes = most_file_bytes
        self._put_as: pa.Schema | None = None
        self._names: list[str] = []
        self._actions: list[AddAction] = []

    def put(
        self, uri: str, columns: pa.Schema, partition_values: Mapping[str, str]
    ) -> list[AddAction]:
        """Put the files into the folder; returns the actions that add them, none without rows.

        Files that have the types of `columns` are copied unchanged.

        Raises:
            TableError: a value can't be kept, or is null and must not be.
            ConflictError: the table wants other columns than staged rows have.
        """
        from deltalake.transaction import AddAction

        if self._staged is not None:
            self._staged.check_stored(uri, columns)
            return [AddAction(**json.loads(file)) for file in self._staged.files]
        if self._put_as == columns:
            return self._actions
        self.remove()
        where = f"output {uri}"
        with tempfile.TemporaryDirectory(prefix="batchllm-delta-") as spool:
            data = self._data
            if any(
                plain_type(f.type) != plain_type(columns.field(f.name).type) for f in self.schema
            ):
                data = self._rewrite(where, columns, Path(spool, "data"))
            footers = [(file, pq.read_metadata(file)) for file in data]
            for _, footer in footers:
                _check_nulls(where, columns, footer)
            stem = f"{self._stem}{uuid.uuid4().hex}"
            self._actions = []
            for file, footer in footers:
                if footer.num_rows:
                    name = f"{stem}-{len(self._names):05d}.parquet"  # sorts in row order
                    self._names.append(name)
                    self._folder.publish_file(file, name)
                    action = AddAction(
                        path=name,  # deltalake escapes it
                        size=file.stat().st_size,
                        partition_values=partition_values,
                        modification_time=time.time_ns() // 1_000_000,
                        data_change=True,
                        stats=_statistics(footer),
                    )
                    self._actions.append(action)
        self._put_as = columns
        return self._actions

    def remove(self) -> None:
        """Remove the files, unless a version may refer to them."""
        while self._names and not self.may_be_committed:
            # Leftovers are harmless, and must not hide the error that led here.
            with suppress(StorageError):
                self._folder.remove(self._names.pop())
        self._names, self._put_as = [], None

    def _rewrite(self, where: str, columns: pa.Schema, target: Path) -> list[Path]:
        """Write the rows to files in the folder `target`, cast to the types of `columns`."""
        most, stored = self._most_file_bytes, StoredColumns(where, columns, has_calendar=False)
        groups = (group for rows in row_groups(self._data, stored) for group in fit(rows, most))
        return write_files(groups, target, columns, most)


def _check_nulls(where: str, columns: pa.Schema, footer: pq.FileMetaData) -> None:
    counts = _null_counts(footer)
    for field in columns:
        if not field.nullable and counts.get(field.name) != 0:
            raise TableError(
                f"{where}: column {field.name!r} may not be null, but not every row of the job's"
                " outputs has a value there"
            )


def _statistics(footer: pq.FileMetaData) -> str:
    """The log's entry on a data file's values (Delta protocol, "Per-file Statistics"), as JSON.

    Minimum and maximum are given for integers, dates and short strings.
    """
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    for name, groups in _flat_columns(footer):
        known = [group for group in groups if group is not None and group.has_min_max]
        with suppress(OverflowError, ValueError):  # a date that Python doesn't know, or no value
            least, greatest = min(group.min for group in known), max(group.max for group in known)
            if len(known) == len(groups) and _is_bound(least) and _is_bound(greatest):
                lowest[name], highest[name] = least, greatest
    described = {
        "numRecords": footer.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": _null_counts(footer),
    }
    return json.dumps(described, default=date.isoformat)


def _is_bound(value: Any) -> bool:
    return type(value) in (int, date) or (
        type(value) is str and len(value) <= _MOST_STATISTIC_CHARS
    )


def _flat_columns(footer: pq.FileMetaData) -> Iterator[tuple[str, list[pq.Statistics | None]]]:
    """The statistics of each row group, for columns without nested values."""
    for idx in range(footer.num_columns):
        column = footer.schema.column(idx)
        if column.path == column.name and not column.max_repetition_level:
            groups = range(footer.num_row_groups)
            yield column.name, [footer.row_group(group).column(idx).statistics for group in groups]


def _null_counts(footer: pq.FileMetaData) -> dict[str, int]:
    return {
        name: sum(group.null_count for group in groups if group is not None)
        for name, groups in _flat_columns(footer)
        if all(group is not None and group.has_null_count for group in groups)
    }
