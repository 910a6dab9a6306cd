"""One partition of an Iceberg table as of its newest snapshot."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, reduce
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import And, BooleanExpression, EqualTo, GreaterThanOrEqual, LessThan
from pyiceberg.expressions.literals import LongLiteral
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.transforms import DayTransform, IdentityTransform, TimeTransform
from pyiceberg.types import DateType, IcebergType, NestedField, PrimitiveType
from pyiceberg.utils.datetime import datetime_to_nanos

from batchllm_operator.errors import TableError
from batchllm_operator.lake.iceberg.catalog import iceberg_errors
from batchllm_operator.lake.iceberg.read import read_file
from batchllm_operator.lake.iceberg.schema import arrow_schema, python_value, rows_named
from batchllm_operator.lake.partition_order import in_order, shown_near
from batchllm_operator.lake.scanning import reading
from batchllm_operator.lake.table import InputFile, Snapshot
from batchllm_operator.spec import FilterTerm


class _Nanos(LongLiteral):
    """Nanoseconds since 1970, which pyiceberg converts to no type of timestamps."""

    def to(self, type_var: IcebergType) -> LongLiteral:
        return self


_COMPARISONS: Final[Mapping[str, Any]] = {"==": EqualTo, ">=": GreaterThanOrEqual, "<": LessThan}


@dataclass(eq=False)
class Partition:
    """The files of a partition."""

    table: Table
    uri: str
    column: str
    name: str
    time_zone: str | None = None

    def __post_init__(self) -> None:
        self._schema = self.table.schema()
        self._field = _partition_field(self.table, self.uri, self.column)
        where = f"table {self.uri}"
        try:
            self._rows = rows_named(where, self._field, self.name, self.time_zone)
        except TableError as error:
            names = partition_names(self.table, self.uri, self.column)
            raise TableError(f"{error}{shown_near(names, self.name)}") from None
        self.value = self._rows[0][1] if len(self._rows) == 1 else None
        """The only one of the column; None if there are several."""

    @cached_property
    def chosen(self) -> BooleanExpression:
        """The partition's rows."""
        rows: Sequence[tuple[str, Any]] = self._rows
        if str(self._field.field_type).endswith("_ns"):
            rows = [(op, _Nanos(datetime_to_nanos(value))) for op, value in rows]
        chosen: BooleanExpression
        chosen = reduce(And, (_COMPARISONS[op](self.column, value) for op, value in rows))
        return chosen

    @cached_property
    def tasks(self) -> list[FileScanTask]:
        """The files that may hold rows of the partition, in the order of their names."""
        if self.table.current_snapshot() is None:
            return []
        with iceberg_errors(self.uri):
            tasks = {
                each.file.file_path: each for each in self.table.scan(self.chosen).plan_files()
            }
        # By the last part of the path first: folders of some layouts are a hash of it.
        return [tasks[path] for path in sorted(tasks, key=lambda p: (PurePosixPath(p).name, p))]

    def snapshot(self) -> Snapshot:
        current = self.table.current_snapshot()
        snapshot_id = "none" if current is None else current.snapshot_id
        version = f"iceberg:{snapshot_id}/{self._schema.schema_id}"
        files = list(map(self._input_file, self.tasks))
        terms = []
        if not all(self.column in file.values for file in files):
            for op, value in self._rows:
                text = value.isoformat() if isinstance(value, date) else value
                term = {"column": self.column, "op": op, "value": text}
                terms.append(FilterTerm.model_validate(term))
        schema = arrow_schema(self._schema)
        snapshot = Snapshot.of(self.name, version, files, schema, self.column)
        return replace(snapshot, conditions=tuple(terms))

    def is_identity(self, spec: PartitionSpec) -> bool:
        """Whether files of a partition spec hold one value of the column each."""
        return any(_is_identity(part, self._field) for part in spec.fields)

    def replaced(self, where: str) -> list[DataFile]:
        """The files that hold the partition's rows; `TableError`: one has others' rows, too.

        So may one that was written when the table wasn't partitioned by the column.
        """
        files = []
        for task in self.tasks:
            file, num_rows, num_own = task.file, 0, 0
            if not self.is_identity(self.table.specs()[file.spec_id]):
                only = Schema(self._field)
                with iceberg_errors(self.uri), reading(self.uri, self.name, file.file_path):
                    details = self._input_file(task)
                    for batch in read_file(self.table, file.file_path, details, only, None):
                        own = pc.equal(batch.column(0), pa.scalar(self.value, batch.column(0).type))
                        num_rows, num_own = num_rows + len(own), num_own + own.true_count
            if 0 < num_own < num_rows:
                raise TableError(
                    f"{where}: {file.file_path} has {num_own} rows of partition {self.name!r} and"
                    f" {num_rows - num_own} of others; rewrite it partitioned by {self.column!r}"
                )
            if num_own == num_rows:
                files.append(file)
        return files

    def _input_file(self, task: FileScanTask) -> InputFile:
        file = task.file
        if file.file_format != FileFormat.PARQUET:
            raise TableError(
                f"table {self.uri}: {file.file_path}: only Parquet data files can be read"
            )
        values = {}
        for place, part in enumerate(self.table.specs()[file.spec_id].fields):
            source = self._schema.find_field(part.source_id)
            if _is_identity(part, source):
                values[source.name] = python_value(source.field_type, file.partition[place])
        deletes = ((each.file_path, each.file_format.value) for each in task.delete_files)
        return InputFile(
            file.file_path.removeprefix(root_of(self.table)),
            file.file_size_in_bytes,
            file.record_count,
            values=values,
            lowest=_bounds(self._schema, file.lower_bounds or {}),
            highest=_bounds(self._schema, file.upper_bounds or {}),
            deletes=tuple(sorted(deletes)),
        )


def root_of(table: Table) -> str:
    """What names of files in the table's folder lack."""
    return f"{table.location().rstrip('/')}/"


def partition_names(table: Table, uri: str, column: str) -> list[str]:
    """Names of the partitions in the table's newest state, ascending: 2026-01 where it is by month.

    A file with several of the column's values, which no transform puts in order, is left out.
    """
    field = _partition_field(table, uri, column)
    only, names = Schema(field), set[str]()
    with iceberg_errors(uri):
        for task in table.scan().plan_files():
            file = task.file
            for place, part in enumerate(table.specs()[file.spec_id].fields):
                named, value = part.transform, file.partition[place]
                is_named = isinstance(named, IdentityTransform | TimeTransform)
                if is_named and part.source_id == field.field_id and value is not None:
                    names.add(named.to_human_string(field.field_type, value))
            low, high = (_bounds(only, b or {}) for b in (file.lower_bounds, file.upper_bounds))
            if low and low == high and not str(field.field_type).startswith("timestamp"):
                names.add(str(low[column]))
    return in_order(names)


def by_values(table: Table, column: str) -> Table | None:
    """The table as if a spec of it by the column's values alone were its newest; None without one.

    So files are laid out by it, as with Spark's `output-spec-id`.
    """
    field = table.schema().find_field(column)
    for spec in (table.spec(), *table.specs().values()):
        if len(spec.fields) == 1 and _is_identity(spec.fields[0], field):
            laid_out = copy(table)
            laid_out.metadata = table.metadata.model_copy(update={"default_spec_id": spec.spec_id})
            return laid_out
    return None


def _bounds(schema: Schema, bounds: Mapping[int, bytes]) -> dict[str, Any]:
    known = {}
    for field in schema.fields:
        if field.field_id in bounds and isinstance(field.field_type, PrimitiveType):
            # A text that was cut within a character; a date that Python doesn't know.
            with suppress(UnicodeDecodeError, OverflowError):
                bound = from_bytes(field.field_type, bounds[field.field_id])
                known[field.name] = python_value(field.field_type, bound)
    return known


def _is_identity(part: PartitionField, field: NestedField) -> bool:
    """Whether a part of a spec is the field's value; a day of dates is, too."""
    is_day = isinstance(part.transform, DayTransform) and isinstance(field.field_type, DateType)
    return part.source_id == field.field_id and (
        is_day or isinstance(part.transform, IdentityTransform)
    )


def _partition_field(table: Table, uri: str, column: str) -> NestedField:
    fields = [field for field in table.schema().fields if field.name == column]
    if not fields or not any(
        part.source_id == fields[0].field_id
        for spec in table.specs().values()
        for part in spec.fields
    ):
        raise TableError(f"table {uri}: isn't partitioned by {column!r}")
    return fields[0]
