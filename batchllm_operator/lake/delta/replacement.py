"""Replaces a partition of a Delta table by one version.

Files of a refused commit are left to the table's vacuum, as a version may yet refer to them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.delta.log import DeltaLog, NextVersion
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.publishing import Publication, RefusedCommit
from batchllm_operator.lake.schema import FormatTypes, fit_columns, holds
from batchllm_operator.lake.staging import StagedFile, Staging
from batchllm_operator.lake.versioned import Change
from batchllm_operator.storage import Folder

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_FILE_PREFIX: Final = "batchllm-"
_MOST_STATISTIC_CHARS: Final = 64
_TYPES: Final = FormatTypes(
    "Delta",
    {kind: kind for kind in (pa.int8(), pa.int16())}
    | {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.float16(): pa.float32()}
    | dict.fromkeys((pa.uint32(), pa.uint64()), pa.int64()),
    has_fixed_binary=False,
    has_calendar=False,
)


class Replacement(Change[TableVersion]):
    """See `Change`: the version after `seen`."""

    def __init__(
        self,
        log: DeltaLog,
        seen: TableVersion | None,
        place: tuple[str, str],
        given: pa.Schema,
        most_file_bytes: int,
        *,
        add_columns: bool,
    ) -> None:
        """`given` are the rows' columns; raises `TableError` if such rows can't be published."""
        column, where = place[0], f"output {log.uri}"
        if seen is None:
            _check_free(log.folder, where)
        else:
            _check_partition(where, seen, *place)
        table = None if seen is None else seen.schema
        stored, new = fit_columns(where, column, given, table, _TYPES, add_columns=add_columns)
        features = ["timestampNtz"] if seen is None else seen.raw.protocol().writer_features or ()
        if "timestampNtz" not in features and any(
            holds(kind, lambda part: types.is_timestamp(part) and part.tz is None)
            for kind in new.types
        ):
            raise TableError(
                f"{where}: a new column holds timestamps without a time zone, for which the table"
                " lacks the Delta feature timestampNtz; add it, or give the column a zone"
            )
        self._log, self._next = log, NextVersion(seen, place, new)
        self._holds_rows = seen is not None and bool(seen.files_of(*place))
        self.staging = _DeltaStaging(
            uri=log.uri,
            schema=given,
            stored=stored,
            file_schema=stored.schema,
            constants={},
            options={"compression": "zstd"},
            most_file_bytes=most_file_bytes,
            most_group_rows=None,
            folder=log.folder.uri,
            prefix="=".join(quote(part, safe="") for part in place) + f"/{_FILE_PREFIX}",
        )

    def rehearse(self) -> None:
        refused = self._log.rehearse(self._next, replaces=self._holds_rows)
        if refused is not None:
            raise refused.error(self._log.uri, self._next.place[1])

    def commit(self, files: Sequence[StagedFile], publication: Publication) -> RefusedCommit | None:
        following = self._next
        if not (following.seen is None or files or following.new or self._holds_rows):
            return None
        actions = [_add_action(file, dict([following.place])) for file in files]
        return self._log.commit(following, actions, publication.properties)


@dataclass(frozen=True)
class _DeltaStaging(Staging):
    """See `Staging`."""

    folder: str
    prefix: str

    def _new_name(self, stem: str) -> str:
        return f"{self.prefix}{stem}-{uuid.uuid4().hex}.parquet"

    def _put(self, path: Path, name: str) -> None:
        Folder.open(self.folder).publish_file(path, name)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(StorageError):
                Folder.open(self.folder).remove(name)


def _check_partition(where: str, version: TableVersion, column: str, value: str) -> None:
    """Refuse a table whose partition, names or rules are none for this package's rows."""
    if version.in_files is not None:
        raise TableError(
            f"{where}: has the Delta feature columnMapping, and this package doesn't write files"
            " with other names than the table's; choose another output table"
        )
    if version.partition_columns != (column,):
        raise TableError(
            f"{where}: is partitioned by {', '.join(version.partition_columns)}; outputs go to"
            f" tables partitioned by {column!r} alone"
        )
    if version.partition_value(column, value) is None:
        raise TableError(
            f"{where}: partition column {column!r} holds {version.schema.field(column).type}, and"
            f" {value!r} isn't how such a value is written"
        )
    if rules := list(version.rules()):
        raise TableError(
            f"{where}: has rules for new rows that this package doesn't apply:"
            f" {', '.join(rules)}; drop them, or choose another output table"
        )


def _check_free(folder: Folder, where: str) -> None:
    """Refuse to create a table among other files: they would not be part of it."""
    for name in folder.find():
        hidden = any(segment.startswith(("_", ".")) for segment in name.split("/"))
        if not hidden and not name.rpartition("/")[2].startswith(_FILE_PREFIX):
            raise TableError(
                f"{where}: holds {name!r}, but is no Delta table; move it away or choose another"
                " output table"
            )


def _add_action(file: StagedFile, partition_values: Mapping[str, str | None]) -> AddAction:
    """The action that adds the file to a version."""
    from deltalake.transaction import AddAction

    return AddAction(
        path=file.name,  # deltalake escapes it
        size=file.size_bytes,
        partition_values=partition_values,
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=_statistics(file.footer),
    )


def _statistics(footer: pq.FileMetaData) -> str:
    """As JSON (Delta protocol, "Per-file Statistics"); bounds of integers, dates, short strings."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    null_counts: dict[str, int] = {}
    for idx in range(footer.num_columns):
        column = footer.schema.column(idx)
        if column.path != column.name or column.max_repetition_level:  # it has nested values
            continue
        name, groups = column.name, range(footer.num_row_groups)
        found = [footer.row_group(group).column(idx).statistics for group in groups]
        if all(group is not None and group.has_null_count for group in found):
            null_counts[name] = sum(group.null_count for group in found)
        if not all(group is not None and group.has_min_max for group in found):
            continue
        with suppress(OverflowError, ValueError):  # a date that Python doesn't know, or no groups
            least, greatest = min(group.min for group in found), max(group.max for group in found)
            if _is_bound(least) and _is_bound(greatest):
                lowest[name], highest[name] = least, greatest
    described = {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest}
    return json.dumps(described | {"nullCount": null_counts}, default=date.isoformat)


def _is_bound(value: Any) -> bool:
    return type(value) in (int, date) or (
        type(value) is str and len(value) <= _MOST_STATISTIC_CHARS
    )
