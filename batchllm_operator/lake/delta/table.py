"""Delta tables on local disk or S3, partitioned by one column (ADR 18)."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.lake.delta.columns import columns_in_file
from batchllm_operator.lake.delta.log import DeltaLog
from batchllm_operator.lake.delta.replacement import Replacement
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.lake.scanning import Scan
from batchllm_operator.lake.table import FilePart, FolderTable, InputFile, Snapshot
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
        found, files = version.files_of(self.partition_column, partition), []
        vectors = self._log.vectors(version) if found else {}
        for file in found:
            if file.num_rows < 0:
                footer, _ = read_footer(self._folder, file.name, file.size_bytes)
                file = replace(file, num_rows=footer.num_rows)
            kept = vectors.get(file.name)
            if kept is not None:
                file = replace(file, deleted=_packed(~kept))
            if kept is None or kept.any():
                files.append(file)
        columns = version.schema, self.partition_column, version.in_files
        return Snapshot.of(partition, f"delta:{version.number}", files, *columns)

    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        schema, condition, values = scan.schema, scan.condition, file.values
        row_groups = None if part is None else part.row_groups
        kept = ~_unpacked(file.deleted, file.num_rows) if file.deleted else None
        with self._folder.open_file(file.name, read_ahead=False) as source:
            if (known := snapshot.in_files) is None:
                yield from read_batches(source, schema, values, condition, row_groups, kept)
                return
            fields = [known.field(snapshot.schema.get_field_index(name)) for name in schema.names]
            held = columns_in_file(pa.schema(fields), source)
            names = dict(zip(schema.names, held.names, strict=True))
            values = {names[name]: value for name, value in values.items() if name in names}
            for batch in read_batches(source, held, values, None, row_groups, kept):
                if schema.names:
                    columns = map(pa.Array.view, batch.columns, schema.types)
                    batch = pa.RecordBatch.from_arrays([*columns], schema=schema)
                yield batch if condition is None else batch.filter(condition)

    def _change(
        self, version: TableVersion | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        place, most = (self.partition_column, partition), self.most_file_bytes
        self._folder.check_conditional_writes("IfNoneMatch")
        return Replacement(self._log, version, place, columns, most, add_columns=add_columns)


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> DeltaTable:
    """The table at an address of this format; `open_table` finds this function by its name."""
    return DeltaTable(address.location, partition_column, most_file_bytes)


def _packed(bits: npt.NDArray[np.bool_]) -> str:
    return b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def _unpacked(text: str, num_bits: int) -> npt.NDArray[np.bool_]:
    data = np.frombuffer(zlib.decompress(b64decode(text)), np.uint8)
    return np.unpackbits(data, count=num_bits).astype(np.bool_)
