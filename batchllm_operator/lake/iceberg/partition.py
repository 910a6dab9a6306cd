"""One partition of an Iceberg table as of one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
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
from batchllm_operator.lake.iceberg.read import IcebergFiles, read_metadata
from batchllm_operator.lake.iceberg.schema import arrow_schema, partition_name, partition_value
from batchllm_operator.lake.partition_order import in_order, shown_near
from batchllm_operator.lake.publishing import RUN_ID, Publication, publisher_in
from batchllm_operator.lake.scanning import may_hold, reading
from batchllm_operator.lake.table import FilePart, InputFile
from batchllm_operator.spec import FilterTerm


class PartitionView:
    """The rows and files of a partition in one snapshot (None for a table without snapshots).

    `schema` is the table's when the snapshot was pinned; `value` is the partition column's.

    Raises:
        TableError: the table isn't partitioned by the column, or the partition's name can't be a
            value of it.
    """

    def __init__(
        self,
        table: Table,
        uri: str,
        column: str,
        partition: str,
        snapshot_id: int | None,
        schema: Schema,
    ) -> None:
        self._table = table
        self.uri = uri
        self.column = column
        self.partition = partition
        self.snapshot_id = snapshot_id
        self._schema = schema
        self._field = _partition_field(table, uri, column, schema)
        try:
            self.value = partition_value(f"table {uri}", self._field.field_type, partition)
        except TableError as error:
            names = partition_names(table, uri, column)
            raise TableError(f"{error}{shown_near(names, partition)}") from None
        self.arrow_schema = arrow_schema(schema)
        self._tasks: dict[str, FileScanTask] | None = None

    @classmethod
    def now(cls, table: Table, uri: str, column: str, partition: str) -> PartitionView:
        """The partition in the table's newest state."""
        current = table.current_snapshot()
        snapshot_id = None if current is None else current.snapshot_id
        return cls(table, uri, column, partition, snapshot_id, table.schema())

    def tasks(self, conditions: Sequence[FilterTerm] = ()) -> list[FileScanTask]:
        """The files that may hold matching rows of the partition, sorted by name."""
        if self.snapshot_id is None:
            return []
        # pyiceberg looks names up in the newest schema, where the column may have been renamed.
        name = self._table.schema().find_column_name(self._field.field_id)
        chosen = EqualTo(name, self.value)  # type: ignore[arg-type, call-arg]
        with iceberg_errors(self.uri):
            scan = self._table.scan(chosen, snapshot_id=self.snapshot_id)
            tasks = [
                task
                for task in scan.plan_files()
                if all(self._may_hold(term, task.file) for term in conditions)
            ]
        # By the last part of the path first: folders of some layouts are a hash of it.
        return sorted(
            tasks, key=lambda task: (PurePosixPath(task.file.file_path).name, task.file.file_path)
        )

    def batches(
        self,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm] = (),
        condition: pds.Expression | None = None,
        part: FilePart | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """See `LakeTable._batches`; the columns come first."""
        tasks = self.tasks(conditions) if part is None else [self._task_of(part.file)]
        wanted = dict.fromkeys(columns)
        if not all(self.is_whole(task.file) for task in tasks):
            wanted[self.column] = None
        # `reading` is the inner one: errors that it lets through are pyiceberg's.
        with iceberg_errors(self.uri), reading(self.uri, self.partition):
            files = IcebergFiles(
                self.uri,
                self._table.metadata,
                self._table.io,
                self._schema,
                list(wanted),
                conditions,
            )
            for task in tasks:
                in_file = condition
                if not self.is_whole(task.file):
                    own = pds.field(self.column) == pa.scalar(self.value)
                    in_file = own if condition is None else own & condition
                with reading(self.uri, self.partition, task.file.file_path):
                    for batch in files.read(task, part):
                        chosen = batch if in_file is None else batch.filter(in_file)
                        if chosen.num_rows:
                            yield chosen

    def footer(self, file: InputFile) -> pq.FileMetaData:
        """See `LakeTable.footer`."""
        path = self._task_of(file).file.file_path
        with iceberg_errors(self.uri), reading(self.uri, self.partition, path):
            return read_metadata(self._table.io, path)

    def coordinates(self, tasks: Sequence[FileScanTask]) -> Iterator[dict[str, str]]:
        """Values of the columns by whose values files are apart; see `Snapshot.of`."""
        for task in tasks:
            values = {}
            for place, part in enumerate(self._table.specs()[task.file.spec_id].fields):
                source = self._schema.find_field(part.source_id)
                if source.field_id == self._field.field_id:
                    values[self.column] = self.partition
                elif _is_identity(part, source.field_id):
                    value = partition_name(source.field_type, task.file.partition[place])
                    values[source.name] = value
            yield values

    def _task_of(self, file: InputFile) -> FileScanTask:
        """The task of one of the partition's files, all of which are looked up once."""
        if self._tasks is None:
            root = f"{self._table.location().rstrip('/')}/"
            self._tasks = {t.file.file_path.removeprefix(root): t for t in self.tasks()}
        if file.name not in self._tasks:
            raise TableError(f"table {self.uri}: the snapshot has no file {file.name!r}")
        return self._tasks[file.name]

    def published(self) -> Publication | None:
        """See `LakeTable.published`."""
        columns = [RUN_ID] if RUN_ID in self.arrow_schema.names else []
        return publisher_in(self.uri, self.partition, self.arrow_schema, self.batches(columns))

    def is_whole(self, file: DataFile) -> bool:
        """Whether the file's partition spec says that all its rows are in this partition."""
        return self.is_identity(self._table.specs()[file.spec_id])

    def is_identity(self, spec: PartitionSpec) -> bool:
        """Whether files of a partition spec hold one value of the column each."""
        return any(_is_identity(part, self._field.field_id) for part in spec.fields)

    def _may_hold(self, term: FilterTerm, file: DataFile) -> bool:
        field: Any = next(field for field in self._schema.fields if field.name == term.column)
        lowest, highest = (
            {term.column: from_bytes(field.field_type, bounds[field.field_id])}
            if bounds and field.field_id in bounds
            else {}
            for bounds in (file.lower_bounds, file.upper_bounds)
        )
        return may_hold(term, lowest, highest, self.arrow_schema)


def partition_names(table: Table, uri: str, column: str) -> list[str]:
    """Names of the partitions in the table's newest state, ascending.

    Raises:
        TableError: the table isn't partitioned by the column's values.
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
