"""Replaces a partition of an Iceberg table by one snapshot."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import copyfileobj
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException, ForbiddenError, UnauthorizedError
from pyiceberg.io.pyarrow import (
    _get_parquet_writer_kwargs,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.table import Table, TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import AssertTableUUID
from pyiceberg.utils.properties import property_as_int

from batchllm_operator.errors import BatchLLMError, TableError
from batchllm_operator.lake.iceberg.branch import begin_branch, drop_branches
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors, without_secrets
from batchllm_operator.lake.iceberg.partition import Partition, by_values
from batchllm_operator.lake.iceberg.schema import ICEBERG, iceberg_schema
from batchllm_operator.lake.publishing import Publication, RefusedCommit, looking_again
from batchllm_operator.lake.schema import fit_columns
from batchllm_operator.lake.staging import StagedFile, Staging
from batchllm_operator.lake.versioned import Change
from batchllm_operator.spec import TableAddress
from batchllm_operator.storage.failures import storage_errors

_NEWEST_FORMAT: Final = 2
_REFUSALS: Final = (CommitFailedException, ForbiddenError, UnauthorizedError)


class Replacement(Change[Table]):
    """See `Change`: a transaction on a table as it was loaded, without pyiceberg's own retries.

    Those would repeat the commit on top of unseen changes. Any failure of ours may be repeated:
    only `_REFUSALS` mean the same in all catalogs, and a lost connection, a locked
    database or a throttled call is an error of SQLAlchemy, botocore, Thrift or requests. To repeat
    is safe, as the table is looked at before each commit.
    """

    def __init__(
        self,
        catalog: CatalogTable,
        place: Partition,
        given: pa.Schema,
        most_file_bytes: int,
        *,
        add_columns: bool,
        branch: str | None = None,
    ) -> None:
        """`given` are the rows' columns; raises `TableError` if such rows can't be published.

        With `branch`, the table's main branch stays as it is.
        """
        self._catalog, self._place, self._uri = catalog, place, place.uri
        self._branch = branch
        self._producer: Any = None
        where = f"output {self._uri}"
        self._table = self._checked(where)
        self._replaced = place.replaced(where)
        table = schema_to_pyarrow(self._table.schema())
        stored, new = fit_columns(
            where, place.column, given, table, ICEBERG, add_columns=add_columns
        )
        with iceberg_errors(self._uri), warnings.catch_warnings(action="ignore"):
            self._transaction: Transaction = self._table.transaction()
            if new:
                with self._transaction.update_schema() as update:
                    update.union_by_name(iceberg_schema(new))
            properties = self._metadata.properties
            # Warnings are of properties without an effect.
            options = _get_parquet_writer_kwargs(properties)
            self.staging = IcebergStaging(
                uri=self._uri,
                schema=given,
                stored=stored,
                file_schema=schema_to_pyarrow(self._metadata.schema()),
                constants={place.column: place.value},
                options={**options, "store_decimal_as_integer": True},
                most_file_bytes=most_file_bytes,
                most_group_rows=property_as_int(
                    properties, TableProperties.PARQUET_ROW_GROUP_LIMIT
                ),
            )

    @property
    def _metadata(self) -> TableMetadata:
        """The table's, with the new columns."""
        return self._transaction.table_metadata

    def _checked(self, where: str) -> Table:
        """The table as outputs are laid out in it; refuses one that they can't go to."""
        table, place = self._place.table, self._place
        if table.format_version > _NEWEST_FORMAT:
            raise TableError(
                f"{where}: has format version {table.format_version}, which pyiceberg can't write;"
                " choose another output table"
            )
        laid_out = by_values(table, place.column)
        if laid_out is None or place.value is None:
            raise TableError(
                f"{where}: outputs go to tables partitioned by the values of {place.column!r} alone"
                f" (text, integers or dates), to one of them; this one has {table.spec()}"
            )
        return laid_out

    def rehearse(self) -> None:
        """Refuse properties of the table that pyiceberg or Arrow refuses."""
        most_rows = self.staging.most_group_rows
        with iceberg_errors(self._uri):
            if most_rows is not None and most_rows < 1:
                raise ValueError(f"{TableProperties.PARQUET_ROW_GROUP_LIMIT} is {most_rows}")
            self._table.location_provider()
            compute_statistics_plan(self._metadata.schema(), self._metadata.properties)
            try:
                sink, schema = pa.MockOutputStream(), self.staging.file_schema
                with pq.ParquetWriter(sink, schema, **self.staging.options) as writer:
                    writer.write_table(schema.empty_table())
            except OSError as error:  # Arrow's, of a codec that it lacks
                raise ValueError(str(error)) from error

    def commit(self, files: Sequence[StagedFile], publication: Publication) -> RefusedCommit | None:
        if not files and not self._replaced:
            return None
        try:
            with iceberg_errors(self._uri):
                self._stage(files, publication.properties)
        except BatchLLMError as error:
            return RefusedCommit(
                str(error), error, is_certain=True, may_repeat=False, kind=type(error)
            )
        staged = self._transaction
        requirements = (*staged._requirements, AssertTableUUID(uuid=self._metadata.table_uuid))
        try:
            self._table._do_commit(updates=staged._updates, requirements=requirements)
            return None
        except Exception as error:  # noqa: BLE001 - each catalog has its own; the table says what happened
            failure = error
        with looking_again(self._uri, publication.partition):
            now = self._catalog.load_again()
        if now is not None and self.is_in(now):
            return None
        text, cause = without_secrets(failure, self._uri)
        if not isinstance(failure, _REFUSALS):
            return RefusedCommit(text, cause, may_arrive=True)
        self._producer._clean_all_uncommitted()  # manifests
        return RefusedCommit(text, cause, is_certain=True)

    def is_in(self, version: Table) -> bool:
        snapshot_id = None if self._producer is None else self._producer.snapshot_id
        return snapshot_id is not None and version.metadata.snapshot_by_id(snapshot_id) is not None

    def _stage(self, files: Sequence[StagedFile], properties: Mapping[str, str]) -> None:
        """Write manifests, and the snapshot into the transaction."""
        if self._branch is not None:
            begin_branch(self._transaction, self._branch)
        target = self._branch or MAIN_BRANCH
        update = self._transaction.update_snapshot(dict(properties), target)
        producer: Any = update.overwrite()
        self._producer, build = producer, producer._build_manifest_evaluator
        # pyiceberg's threads share an evaluator, which holds the manifest that it looks at: without
        # one for each call, manifests are now and then taken for others, and files not found.
        producer._build_manifest_evaluator = lambda spec_id: lambda file: build(spec_id)(file)
        producer.delete_by_predicate(self._place.chosen)  # else no file without partition is found
        for old in self._replaced:
            self._producer.delete_data_file(old)
        for file in files:
            self._producer.append_data_file(self._data_file(file))
        self._producer.commit()
        if self._branch is None:
            drop_branches(self._transaction, properties)

    def _data_file(self, file: StagedFile) -> DataFile:
        schema = self._metadata.schema()
        statistics = data_file_statistics_from_parquet_metadata(
            file.footer,
            compute_statistics_plan(schema, self._metadata.properties),
            parquet_path_to_id_mapping(schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.name,
            file_format=FileFormat.PARQUET,
            partition=_partition_key(self._table, self._place.value).partition,
            file_size_in_bytes=file.size_bytes,
            sort_order_id=None,
            spec_id=self._metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )


@dataclass(frozen=True)
class IcebergStaging(Staging):
    """See `Staging`; a process that gets it loads the table itself."""

    @cached_property
    def _table(self) -> Table:
        table = CatalogTable(TableAddress.parse(self.uri)).load()
        if table is None:
            raise TableError(f"output {self.uri}: the table was removed meanwhile; commit again")
        laid_out = by_values(table, *self.constants)
        assert laid_out is not None, "it is checked before rows are staged"
        return laid_out

    def _new_name(self, stem: str) -> str:
        (value,) = self.constants.values()
        key = _partition_key(self._table, value)
        with iceberg_errors(self.uri):
            provider = self._table.location_provider()
            return provider.new_data_location(f"{stem}-{uuid.uuid4()}.parquet", key)

    def _put(self, path: Path, name: str) -> None:
        with (
            iceberg_errors(self.uri),
            path.open("rb") as source,
            self._table.io.new_output(name).create() as target,
        ):
            copyfileobj(source, cast(Any, target), 8 << 20)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(*storage_errors(), BatchLLMError):
                self._table.io.delete(name)


def _partition_key(table: Table, value: Any) -> PartitionKey:
    """The partition of a table that is partitioned by one column."""
    (field,) = table.spec().fields
    return PartitionKey([PartitionFieldValue(field, value)], table.spec(), table.schema())
