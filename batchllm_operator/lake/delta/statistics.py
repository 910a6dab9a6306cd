"""The log's entry on a data file, with statistics from its footer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from batchllm_operator.lake.staging import StagedFile

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_MOST_STATISTIC_CHARS: Final = 64


def add_action(file: StagedFile, partition_values: Mapping[str, str | None]) -> AddAction:
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
    for name, groups in _flat_columns(footer):
        if all(group is not None and group.has_null_count for group in groups):
            null_counts[name] = sum(group.null_count for group in groups)
        if not all(group is not None and group.has_min_max for group in groups):
            continue
        with suppress(OverflowError, ValueError):  # a date that Python doesn't know, or no groups
            least, greatest = min(group.min for group in groups), max(group.max for group in groups)
            if _is_bound(least) and _is_bound(greatest):
                lowest[name], highest[name] = least, greatest
    described = {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest}
    return json.dumps(described | {"nullCount": null_counts}, default=date.isoformat)


def _is_bound(value: Any) -> bool:
    return type(value) in (int, date) or (
        type(value) is str and len(value) <= _MOST_STATISTIC_CHARS
    )


def _flat_columns(footer: pq.FileMetaData) -> Iterator[tuple[str, list[Any]]]:
    """The statistics of each row group, for columns without nested values."""
    for idx in range(footer.num_columns):
        column = footer.schema.column(idx)
        if column.path == column.name and not column.max_repetition_level:
            groups = range(footer.num_row_groups)
            yield column.name, [footer.row_group(group).column(idx).statistics for group in groups]
