"""Delta tables on local disk or S3, partitioned by one column (ADR 18)."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from batchllm_operator.lake.delta.log import DeltaLog
from batchllm_operator.lake.delta.replacement import Replacement
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.lake.table import FolderTable, Snapshot
from batchllm_operator.lake.versioned import VersionedTable
from batchllm_operator.spec import TARGET_FILE_BYTES, TableAddress
from batchllm_operator.storage import Folder


class DeltaTable(FolderTable, VersionedTable[TableVersion]):
    """A Delta table; its partition column holds strings, integers or dates."""

    forbidden_in_names = " ,;{}()\n\t=\0"  # without column mapping

    def __init__(
        self, uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
    ) -> None:
        """`uri` is a local path or an `s3://` URI; raises as `open_table`."""
        self._folder = Folder.open(uri)
        self._log = DeltaLog(self._folder)
        super().__init__(self._log.uri, partition_column, most_file_bytes)

    def partitions(self) -> list[str]:
        """Partitions with files. Rows where the column is null are in none."""
        version = self._log.latest()
        if version is None:
            return []
        version.check_partitioned_by(self.partition_column)
        values = {file.values[self.partition_column] for file in version.files()}
        return in_order(str(value) for value in values if value is not None)

    def _latest(self) -> TableVersion | None:
        return self._log.latest()

    def _pin(self, version: TableVersion, partition: str) -> Snapshot:
        files, column = version.files_of(self.partition_column, partition), self.partition_column
        for idx, file in enumerate(files):
            if file.num_rows < 0:
                footer, _ = read_footer(self._folder, file.name, file.size_bytes)
                files[idx] = replace(file, num_rows=footer.num_rows)
        return Snapshot.of(partition, f"delta:{version.number}", files, version.schema, column)

    def _change(
        self, version: TableVersion | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        place, most = (self.partition_column, partition), self.most_file_bytes
        self._folder.check_conditional_writes("IfNoneMatch")
        return Replacement(self._log, version, place, columns, most, add_columns=add_columns)


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> DeltaTable:
    """The table at an address of this format; `open_table` finds this function by its name."""
    return DeltaTable(address.location, partition_column, most_file_bytes)
