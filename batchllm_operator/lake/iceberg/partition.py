"""One partition of an Iceberg table as of one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField

from batchllm_operator.errors import TableError
from batchllm_operator.lake.iceberg.catalog import iceberg_errors
from batchllm_operator.lake.iceberg.read import read_task
from batchllm_operator.lake.iceberg.schema import arrow_schema, partition_name, partition_value
from batchllm_operator.lake.partition_order import in_order, shown_near
from batchllm_operator.lake.scanning import Scan
from batchllm_operator.lake.table import FilePart, InputFile, Snapshot
from batchllm_operator.spec import FilterTerm


@dataclass(eq=False)
class PartitionView:
    """The rows and files of a partition in one snapshot.

    Raises `TableError`: the table isn't partitioned by the column, or the partition's name can't be
    a value of it.
    """

    table: Table
    uri: str
    column: str
    partition: str
    snapshot_id: int | None
    """None for a table without snapshots."""
    schema: Schema
    """The table's when the snapshot was pinned."""

    def __post_init__(self) -> None:
        self._field = _partition_field(self.table, self.uri, self.column, self.schema)
        try:
            self.value = partition_value(f"table {self.uri}", self._field, self.partition)
        except TableError as error:
            names = partition_names(self.table, self.uri, self.column)
            raise TableError(f"{error}{shown_near(names, self.partition)}") from None
        self.arrow_schema = arrow_schema(self.schema)

    @cached_property
    def tasks(self) -> dict[str, FileScanTask]:
        """The files that may hold rows of the partition, by name, in the order of their names."""
        if self.snapshot_id is None:
            return {}
        # pyiceberg looks names up in the newest schema, where the column may have been renamed.
        name = self.table.schema().find_column_name(self._field.field_id)
        chosen = EqualTo(name, self.value)  # type: ignore[arg-type, call-arg]
        with iceberg_errors(self.uri):
            planned = self.table.scan(chosen, snapshot_id=self.snapshot_id).plan_files()
            tasks = {task.file.file_path: task for task in planned}
        root = f"{self.table.location().rstrip('/')}/"
        # By the last part of the path first: folders of some layouts are a hash of it.
        ordered = sorted(tasks, key=lambda path: (PurePosixPath(path).name, path))
        return {path.removeprefix(root): tasks[path] for path in ordered}

    @property
    def version(self) -> str:
        snapshot_id = "none" if self.snapshot_id is None else self.snapshot_id
        return f"iceberg:{snapshot_id}/{self.schema.schema_id}"

    def snapshot(self) -> Snapshot:
        files = {}
        for name, task in self.tasks.items():
            size_bytes, num_rows = task.file.file_size_in_bytes, task.file.record_count
            files[InputFile(name, size_bytes, num_rows, "immutable")] = self._coordinates(task.file)
        schema, column = self.arrow_schema, self.column
        return Snapshot.of(self.partition, self.version, files, schema, column)

    def task_of(self, file: InputFile) -> FileScanTask:
        """Raises `TableError` if the snapshot has no such file."""
        if file.name not in self.tasks:
            raise TableError(f"table {self.uri}: the snapshot has no file {file.name!r}")
        return self.tasks[file.name]

    def read(self, file: InputFile, scan: Scan, part: FilePart | None) -> Iterator[pa.RecordBatch]:
        """See `LakeTable._read`."""
        task = self.task_of(file)
        if not scan.may_match(*self._bounds(task.file, scan.conditions)):
            return
        wanted, condition = dict.fromkeys(scan.schema.names), scan.condition
        if not self.is_whole(task.file):
            wanted[self.column] = None
            own = pds.field(self.column) == pa.scalar(self.value)
            condition = own if condition is None else own & condition
        fields = {field.name: field for field in self.schema.fields}
        schema = Schema(*(fields[name] for name in wanted))
        for batch in read_task(self.table, task, schema, scan, part):
            chosen = batch if condition is None else batch.filter(condition)
            if chosen.num_rows:
                yield chosen

    def is_whole(self, file: DataFile) -> bool:
        """Whether the file's partition spec says that all its rows are in this partition."""
        return self.is_identity(self.table.specs()[file.spec_id])

    def is_identity(self, spec: PartitionSpec) -> bool:
        """Whether files of a partition spec hold one value of the column each."""
        return any(_is_identity(part, self._field.field_id) for part in spec.fields)

    def _coordinates(self, file: DataFile) -> dict[str, str]:
        """Values of the columns by whose values files are apart; see `Snapshot.of`."""
        values = {}
        for place, part in enumerate(self.table.specs()[file.spec_id].fields):
            source = self.schema.find_field(part.source_id)
            if source.field_id == self._field.field_id:
                values[self.column] = self.partition
            elif _is_identity(part, source.field_id):
                values[source.name] = partition_name(source.field_type, file.partition[place])
        return values

    def _bounds(self, file: DataFile, conditions: Sequence[FilterTerm]) -> Iterator[dict[str, Any]]:
        """Lowest and highest values of the conditions' columns."""
        fields = [self.schema.find_field(term.column) for term in conditions]
        for bounds in (file.lower_bounds or {}, file.upper_bounds or {}):
            yield {
                field.name: from_bytes(field.field_type, bounds[field.field_id])  # type: ignore[arg-type]
                for field in fields
                if field.field_id in bounds
            }


def partition_names(table: Table, uri: str, column: str) -> list[str]:
    """Names of the partitions in the table's newest state, ascending.

    Raises `TableError`: the table isn't partitioned by the column's values.
    """
    field = _partition_field(table, uri, column, table.schema())
    names: set[str] = set()
    with iceberg_errors(uri):
        for task in table.scan().plan_files():
            parts = table.specs()[task.file.spec_id].fields
            places = [idx for idx, part in enumerate(parts) if _is_identity(part, field.field_id)]
            if not places:
                raise TableError(f"table {uri}: isn't partitioned by the values of {column!r}")
            value = task.file.partition[places[0]]
            if value is not None:
                names.add(partition_name(field.field_type, value))
    return in_order(names)


def _is_identity(part: PartitionField, field_id: int) -> bool:
    return part.source_id == field_id and isinstance(part.transform, IdentityTransform)


def _partition_field(table: Table, uri: str, column: str, schema: Schema) -> NestedField:
    fields = [field for field in schema.fields if field.name == column]
    if not fields or not any(
        part.source_id == fields[0].field_id
        for spec in table.specs().values()
        for part in spec.fields
    ):
        raise TableError(f"table {uri}: isn't partitioned by {column!r}")
    return fields[0]
