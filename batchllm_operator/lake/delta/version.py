"""One version of a Delta table, as its log describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from batchllm_operator.errors import TableError
from batchllm_operator.lake.partition_order import CAN_NOT_NAME, shown_near

if TYPE_CHECKING:
    import deltalake

_CONSTRAINT: Final = "delta.constraints."
_COLUMN_RULES: Final = ("delta.invariants", "delta.generationExpression", "delta.identity.")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file of a version."""

    name: str
    """Path relative to the table's root, unescaped."""
    partition_values: Mapping[str, Any]
    """By partition column, as Python values of its type; None is null."""
    size_bytes: int
    modified_ms: int
    num_rows: int | None
    lowest: Mapping[str, Any]
    """Lower bounds of values, by column. Columns may be missing."""
    highest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A table as of one version."""

    number: int
    schema: pa.Schema
    partition_columns: tuple[str, ...]
    checks: tuple[str, ...]
    """Names of the rules for new rows that a writer must apply."""
    takes_local_time: bool
    """Whether columns of timestamps without a time zone may be added."""
    raw: deltalake.DeltaTable

    @classmethod
    def of(cls, raw: deltalake.DeltaTable) -> TableVersion:
        metadata = raw.metadata()
        return cls(
            number=raw.version(),
            schema=pa.schema(raw.schema().to_arrow()),
            partition_columns=tuple(metadata.partition_columns),
            checks=tuple(_checks(raw)),
            takes_local_time="timestampNtz" in (raw.protocol().writer_features or ()),
            raw=raw,
        )

    def write_empty_copy(self, log: Path, held: Mapping[str, str] | None) -> None:
        """Write a log of one version to the new folder `log`, without this version's files.

        With `held`, it has one file of these partition values, which isn't there.
        """
        protocol, metadata = self.raw.protocol(), self.raw.metadata()
        described = {
            "minReaderVersion": protocol.min_reader_version,
            "minWriterVersion": protocol.min_writer_version,
            "readerFeatures": protocol.reader_features,
            "writerFeatures": protocol.writer_features,
        }
        actions: list[dict[str, Any]] = [
            {"protocol": {name: value for name, value in described.items() if value is not None}},
            {
                "metaData": {
                    "id": str(metadata.id),
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": self.raw.schema().to_json(),
                    "partitionColumns": metadata.partition_columns,
                    "configuration": metadata.configuration,
                }
            },
        ]
        if held is not None:
            file = {"path": "old.parquet", "partitionValues": dict(held), "size": 1}
            actions.append({"add": file | {"modificationTime": 1, "dataChange": True}})
        log.mkdir()
        (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))

    def files(self) -> Iterator[DataFile]:
        actions = pa.table(self.raw.get_add_actions())
        for batch in actions.to_batches(1024):
            for action in batch.to_pylist():
                yield DataFile(
                    name=unquote(action["path"]),
                    partition_values=action.get("partition") or {},
                    size_bytes=action["size_bytes"],
                    modified_ms=action["modification_time"],
                    num_rows=action["num_records"],
                    lowest=action.get("min") or {},
                    highest=action.get("max") or {},
                )

    def partition_value(self, column: str, partition: str) -> str | int | date | None:
        """The partition column's value whose text is `partition`; None if there is none.

        Raises:
            TableError: the column doesn't hold strings, integers or dates.
        """
        kind = self.schema.field(column).type
        if pa.types.is_string(kind):
            return partition or None  # Delta keeps an empty text as null
        try:
            value: int | date
            if pa.types.is_integer(kind):
                value = int(partition)
            elif pa.types.is_date(kind):
                value = date.fromisoformat(partition)
            else:
                names = [str(file.partition_values[column]) for file in self.files()]
                raise TableError(
                    f"table {self.raw.table_uri}: partition column {column!r} holds {kind},"
                    f" {CAN_NOT_NAME}{shown_near(names, partition)}"
                )
        except ValueError:
            return None
        return value if str(value) == partition else None


def _checks(raw: deltalake.DeltaTable) -> Iterator[str]:
    """Constraints, and columns whose values the writer has to check or generate."""
    yield from (name for name in raw.metadata().configuration if name.startswith(_CONSTRAINT))
    for field in raw.schema().fields:
        if any(key.startswith(_COLUMN_RULES) for key in field.metadata):
            yield f"column {field.name}"
