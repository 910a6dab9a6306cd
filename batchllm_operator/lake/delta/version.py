"""One version of a Delta table, as its log describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.errors import TableError
from batchllm_operator.lake.delta.columns import PHYSICAL_NAME
from batchllm_operator.lake.partition_order import CAN_NOT_NAME, shown_near, value_named
from batchllm_operator.lake.table import InputFile

if TYPE_CHECKING:
    import deltalake

_CONSTRAINT: Final = "delta.constraints."
_COLUMN_RULES: Final = ("delta.invariants", "delta.generationExpression", "delta.identity.")


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A table as of one version, as its log describes it."""

    uri: str
    number: int
    schema: pa.Schema
    in_files: pa.Schema | None
    """Its columns as `columns_in_file` finds them; None without column mapping."""
    partition_columns: tuple[str, ...]
    raw: deltalake.DeltaTable

    def rules(self) -> Iterator[str]:
        """Names of the rules for new rows that a writer must apply: constraints, and columns whose
        values it has to check or generate.
        """
        settings = self.raw.metadata().configuration
        yield from (name for name in settings if name.startswith(_CONSTRAINT))
        for field in self.raw.schema().fields:
            if any(key.startswith(_COLUMN_RULES) for key in field.metadata):
                yield f"column {field.name}"

    def files(self) -> Iterator[InputFile]:
        """All data files; those whose rows the log doesn't count have -1."""
        # Bounds are of physical names, values of partition columns are not.
        fields = () if self.in_files is None else self.raw.schema().fields
        names = {str(field.metadata[PHYSICAL_NAME.decode()]): field.name for field in fields}
        for batch in pa.table(self.raw.get_add_actions()).to_batches(1024):
            for action in batch.to_pylist():
                num_rows = action["num_records"]
                yield InputFile(
                    name=unquote(action["path"]),
                    size_bytes=action["size_bytes"],
                    num_rows=-1 if num_rows is None else num_rows,
                    values={name: action["partition"][name] for name in self.partition_columns},
                    lowest=_named(action.get("min") or {}, names),
                    highest=_named(action.get("max") or {}, names),
                )

    def vectors(self) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        """See `DeltaLog.vectors`; delta-rs reads those of all partitions."""
        root = unquote(self.raw.table_uri).rstrip("/") + "/"
        known = {*map(unquote, pa.table(self.raw.get_add_actions())["path"].to_pylist())}
        for batch in self.raw.deletion_vectors():
            paths, vectors = map(pa.array, map(batch.column, ("filepath", "selection_vector")))
            for path, vector in zip(paths.to_pylist(), vectors, strict=True):
                name = unquote(path).removeprefix(root)
                assert name in known, f"{path} isn't a file of the table"
                yield name, vector.values.to_numpy(zero_copy_only=False)

    def files_of(self, column: str, partition: str) -> list[InputFile]:
        """A partition's files, by name; raises `TableError` if one lies outside of the table."""
        self.check_partitioned_by(column)
        value = self.partition_value(column, partition)
        if value is None:
            return []
        chosen = [file for file in self.files() if file.values[column] == value]
        for file in chosen:
            if "://" in file.name or file.name.startswith("/") or ".." in file.name.split("/"):
                raise TableError(
                    f"table {self.uri}: refers to a file outside of its folder, {file.name!r}, as"
                    " shallow clones do; copy it to a table of its own"
                )
        return sorted(chosen, key=lambda file: file.name)

    def check_partitioned_by(self, column: str) -> None:
        """Raise `TableError` if the column isn't a partition column."""
        if column not in self.partition_columns:
            raise TableError(
                f"table {self.uri}: isn't partitioned by {column!r}, but by"
                f" {', '.join(self.partition_columns) or 'no column'}"
            )

    def partition_value(self, column: str, partition: str) -> str | int | date | None:
        """The partition column's value whose text is `partition`; None if there is none."""
        kind = self.schema.field(column).type
        try:
            value = value_named(partition, kind)
        except TypeError:
            names = [str(file.values[column]) for file in self.files()]
            raise TableError(
                f"table {self.uri}: partition column {column!r} holds {kind},"
                f" {CAN_NOT_NAME}{shown_near(names, partition)}"
            ) from None
        return None if value == "" else value  # Delta keeps an empty text as null

    def write_empty_copy(self, log: Path, held: Mapping[str, str] | None) -> None:
        """Write a log of one version to the new folder `log`: without files, or with a file of the
        partition values `held`, which isn't there.
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


def _named(bounds: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    return {names[name]: bounds[name] for name in bounds} if names else bounds
