"""Data files for an Iceberg table that are written before the commit, by any process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from batchllm_operator.errors import TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors
from batchllm_operator.lake.iceberg.commit import Overwrite
from batchllm_operator.lake.iceberg.partition import PartitionView
from batchllm_operator.lake.iceberg.publish import stored_columns
from batchllm_operator.lake.iceberg.schema import arrow_schema, iceberg_schema, storable_schema
from batchllm_operator.lake.iceberg.write import StagedFiles
from batchllm_operator.lake.table import StagedRows
from batchllm_operator.spec import TableAddress


@dataclass(frozen=True, slots=True)
class IcebergStaging:
    """See `Staging`."""

    uri: str
    column: str
    partition: str
    schema: pa.Schema
    new: tuple[str, ...]
    """Columns that the table lacks."""
    stored: pa.Schema
    most_file_bytes: int

    @classmethod
    def of(
        cls,
        catalog_table: CatalogTable,
        column: str,
        partition: str,
        schema: pa.Schema,
        most_file_bytes: int,
    ) -> IcebergStaging:
        """For rows that fit the table, which is created if there is none."""
        rows = storable_schema(f"table {catalog_table.uri}", schema)
        table = catalog_table.load() or catalog_table.create(rows, column)
        has = {field.name for field in table.schema().fields}
        new = tuple(name for name in rows.names if name not in has)
        with iceberg_errors(catalog_table.uri):
            added = iceberg_schema(pa.schema([rows.field(name) for name in new]))
            stored = arrow_schema(Overwrite(table, added).metadata.schema())
        uri = catalog_table.uri
        return cls(uri, column, partition, schema, new, stored, most_file_bytes)

    def put(self, data: Path, number: int) -> list[str]:
        rows = storable_schema(f"table {self.uri}", self.schema)
        catalog_table = CatalogTable(TableAddress.parse(self.uri))
        table = catalog_table.load()
        if table is None:
            raise TableError(f"output {self.uri}: the table was removed meanwhile; commit again")
        with iceberg_errors(self.uri):
            view = PartitionView.now(table, self.uri, self.column, self.partition)
            added = iceberg_schema(pa.schema([rows.field(name) for name in self.new]))
            metadata = Overwrite(table, added).metadata
            staged = StagedFiles(table, metadata, self.column, view.value, number)
            stored = stored_columns(self.uri, table, rows)
            staged.write(files_of(data), stored, self.most_file_bytes)
        return staged.entries

    def rows(self, files: Sequence[str]) -> StagedRows:
        return StagedRows(self.schema, self.stored, tuple(files))
