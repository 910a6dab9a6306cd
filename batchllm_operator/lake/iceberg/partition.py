"""One partition of an Iceberg table as of its newest snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import FileScanTask, Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField, PrimitiveType

from batchllm_operator.errors import TableError
from batchllm_operator.lake.iceberg.catalog import iceberg_errors
from batchllm_operator.lake.iceberg.schema import arrow_schema, partition_value, python_value
from batchllm_operator.lake.partition_order import in_order, shown_near
from batchllm_operator.lake.table import InputFile, Snapshot


@dataclass(eq=False)
class Partition:
    """The files of a partition."""

    table: Table
    uri: str
    column: str
    name: str

    def __post_init__(self) -> None:
        self._schema = self.table.schema()
        self._field = _partition_field(self.table, self.uri, self.column)
        try:
            self.value = partition_value(f"table {self.uri}", self._field, self.name)
        except TableError as error:
            names = partition_names(self.table, self.uri, self.column)
            raise TableError(f"{error}{shown_near(names, self.name)}") from None

    @cached_property
    def tasks(self) -> list[FileScanTask]:
        """The files that may hold rows of the partition, in the order of their names."""
        if self.table.current_snapshot() is None:
            return []
        chosen = EqualTo(self.column, self.value)  # type: ignore[arg-type, call-arg]
        with iceberg_errors(self.uri):
            tasks = {task.file.file_path: task for task in self.table.scan(chosen).plan_files()}
        # By the last part of the path first: folders of some layouts are a hash of it.
        return [tasks[path] for path in sorted(tasks, key=lambda p: (PurePosixPath(p).name, p))]

    def snapshot(self) -> Snapshot:
        current = self.table.current_snapshot()
        snapshot_id = "none" if current is None else current.snapshot_id
        version = f"iceberg:{snapshot_id}/{self._schema.schema_id}"
        files = list(map(self._input_file, self.tasks))
        return Snapshot.of(self.name, version, files, arrow_schema(self._schema), self.column)

    def is_identity(self, spec: PartitionSpec) -> bool:
        """Whether files of a partition spec hold one value of the column each."""
        return any(_is_identity(part, self._field.field_id) for part in spec.fields)

    def _input_file(self, task: FileScanTask) -> InputFile:
        file = task.file
        if file.file_format != FileFormat.PARQUET:
            raise TableError(
                f"table {self.uri}: {file.file_path}: only Parquet data files can be read"
            )
        values = {}
        for place, part in enumerate(self.table.specs()[file.spec_id].fields):
            source = self._schema.find_field(part.source_id)
            if _is_identity(part, source.field_id):
                values[source.name] = python_value(source.field_type, file.partition[place])
        deletes = ((each.file_path, each.file_format.value) for each in task.delete_files)
        return InputFile(
            file.file_path.removeprefix(root_of(self.table)),
            file.file_size_in_bytes,
            file.record_count,
            values=values,
            lowest=self._bounds(file.lower_bounds or {}),
            highest=self._bounds(file.upper_bounds or {}),
            deletes=tuple(sorted(deletes)),
        )

    def _bounds(self, bounds: Mapping[int, bytes]) -> dict[str, Any]:
        known = {}
        for field in self._schema.fields:
            if field.field_id in bounds and isinstance(field.field_type, PrimitiveType):
                # A text that was cut within a character; a date that Python doesn't know.
                with suppress(UnicodeDecodeError, OverflowError):
                    bound = from_bytes(field.field_type, bounds[field.field_id])
                    known[field.name] = python_value(field.field_type, bound)
        return known


def root_of(table: Table) -> str:
    """What names of files in the table's folder lack."""
    return f"{table.location().rstrip('/')}/"


def partition_names(table: Table, uri: str, column: str) -> list[str]:
    """Names of the partitions in the table's newest state, ascending."""
    field = _partition_field(table, uri, column)
    names: set[str] = set()
    with iceberg_errors(uri):
        for task in table.scan().plan_files():
            parts = table.specs()[task.file.spec_id].fields
            places = [idx for idx, part in enumerate(parts) if _is_identity(part, field.field_id)]
            if not places:
                raise TableError(f"table {uri}: isn't partitioned by the values of {column!r}")
            value = task.file.partition[places[0]]
            if value is not None:
                names.add(str(python_value(field.field_type, value)))
    return in_order(names)


def _is_identity(part: PartitionField, field_id: int) -> bool:
    return part.source_id == field_id and isinstance(part.transform, IdentityTransform)


def _partition_field(table: Table, uri: str, column: str) -> NestedField:
    fields = [field for field in table.schema().fields if field.name == column]
    if not fields or not any(
        part.source_id == fields[0].field_id
        for spec in table.specs().values()
        for part in spec.fields
    ):
        raise TableError(f"table {uri}: isn't partitioned by {column!r}")
    return fields[0]
