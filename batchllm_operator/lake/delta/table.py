"""Delta tables on local disk or S3, partitioned by one column (ADR 18)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from batchllm_operator.errors import TableError
from batchllm_operator.lake.delta.log import DeltaLog
from batchllm_operator.lake.delta.replacement import Replacement
from batchllm_operator.lake.delta.version import DataFile, TableVersion
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.lake.scanning import Scan
from batchllm_operator.lake.table import FilePart, FolderTable, InputFile, Snapshot
from batchllm_operator.lake.versioned import VersionedTable
from batchllm_operator.spec import TARGET_FILE_BYTES, TableAddress
from batchllm_operator.storage import Folder


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> DeltaTable:
    return DeltaTable(address.location, partition_column, most_file_bytes)


class DeltaTable(FolderTable, VersionedTable[TableVersion]):
    """A Delta table; its partition column holds strings, integers or dates."""

    forbidden_in_names = " ,;{}()\n\t=\0"  # without column mapping

    def __init__(
        self, uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
    ) -> None:
        """`uri` is a local path or an `s3://` URI; `most_file_bytes` bounds new data files.

        Raises:
            SpecError: a Delta table can't be there.
            ModuleNotFoundError: deltalake isn't installed.
        """
        self._folder = Folder.open(uri)
        self._log = DeltaLog(self._folder)
        super().__init__(self._log.uri, partition_column, most_file_bytes)
        self._pinned: tuple[tuple[str, str], dict[str, DataFile]] = (("", ""), {})

    def partitions(self) -> list[str]:
        """Partitions with files. Rows where the column is null are in none."""
        version = self._log.latest()
        if version is None:
            return []
        version.check_partitioned_by(self.partition_column)
        values = {file.partition_values[self.partition_column] for file in version.files()}
        return in_order(str(value) for value in values if value is not None)

    def _latest(self) -> TableVersion | None:
        return self._log.latest()

    def _pin(self, version: TableVersion, partition: str) -> Snapshot:
        stored = version.files_of(self.partition_column, partition)
        name = f"delta:{version.number}"
        self._pinned = ((name, partition), {file.name: file for file in stored})
        columns = version.partition_columns
        files = {
            self._input_file(file): {name: str(file.partition_values[name]) for name in columns}
            for file in stored
        }
        return Snapshot.of(partition, name, files, version.schema, self.partition_column)

    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        stored = self._stored(snapshot, file)
        if scan.may_match(stored.lowest, stored.highest):
            yield from self._read_file(file, scan, stored.partition_values, part)

    def _stored(self, snapshot: Snapshot, file: InputFile) -> DataFile:
        """The log's entry; those of the last snapshot are kept."""
        pinned = (snapshot.version, snapshot.partition)
        if self._pinned[0] != pinned:
            number = snapshot.version.removeprefix("delta:")
            if number == snapshot.version or not number.isdecimal():
                raise TableError(f"table {self.uri}: {snapshot.version!r} is no version of Delta")
            self._pin(self._log.at(int(number)), snapshot.partition)
        if file.name not in self._pinned[1]:
            raise TableError(
                f"table {self.uri}: is another one than when {snapshot.version} was looked at, with"
                f" {file.name!r}; plan again"
            )
        return self._pinned[1][file.name]

    def _input_file(self, file: DataFile) -> InputFile:
        num_rows = file.num_rows
        if num_rows is None:  # not every writer stores it
            num_rows = read_footer(self._folder, file.name, file.size_bytes)[0].num_rows
        return InputFile(file.name, file.size_bytes, num_rows, f"modified:{file.modified_ms}")

    def _change(
        self, version: TableVersion | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        place, most = (self.partition_column, partition), self.most_file_bytes
        self._folder.check_conditional_writes("IfNoneMatch")
        return Replacement(self._log, version, place, columns, most, add_columns=add_columns)
