"""Loads and creates an Iceberg table in its catalog, with this package's errors."""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    NoSuchIcebergTableError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NotInstalledError,
    ResolveError,
    ValidationException,
)
from pyiceberg.exceptions import ValidationError as IcebergValidationError
from pyiceberg.io import FileIO
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.utils.config import Config

from batchllm_operator.errors import (
    BatchLLMError,
    MissingLibraryError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.lake.iceberg.credentials import LentFileIO
from batchllm_operator.lake.iceberg.schema import iceberg_schema
from batchllm_operator.secrets import Masker
from batchllm_operator.spec import TableAddress

_FAULTS_OF_THE_TABLE = (
    FileNotFoundError,
    ValueError,
    TypeError,
    OverflowError,
    NotImplementedError,  # pyiceberg's, of what it doesn't support
    pa.ArrowException,
    ResolveError,
    ValidationException,
    IcebergValidationError,
)
_MISSING = (NoSuchIcebergTableError, NoSuchTableError)


class CatalogTable:
    """A table that may not exist yet."""

    def __init__(self, address: TableAddress) -> None:
        """Find the catalog by pyiceberg's own configuration; raises as `open_table`."""
        self.uri = address.uri
        self._identifier = tuple(address.identifier.split("."))
        self._name = address.catalog
        self._catalog = self._open()

    def load(self) -> Table | None:
        """The table as it is now; None if there is none."""
        try:
            with iceberg_errors(self.uri, faults=(), passing=_MISSING):
                return self._lasting(self._catalog.load_table(self._identifier))
        except NoSuchIcebergTableError as error:
            text, cause = without_secrets(error, self.uri)
            raise TableError(f"table {self.uri}: isn't an Iceberg table: {text}") from cause
        except NoSuchTableError:
            return None

    def load_again(self) -> Table | None:
        """Load the table over a new connection, as other clients see it, after a failed commit.

        A connection whose commit was refused (SQLite: database is locked) may keep the transaction
        open, and answer as if it were committed.
        """
        with iceberg_errors(self.uri, faults=()):
            self._close()
        self._catalog = self._open()
        return self.load()

    def check_create(self, rows: pa.Schema, partition_column: str) -> tuple[Schema, PartitionSpec]:
        """Schema and partitioning of a new table; raises `TableError` if `create` would."""
        try:
            with iceberg_errors(self.uri, passing=(NoSuchNamespaceError,)):
                self._catalog.load_namespace_properties(self._identifier[:-1])
                schema = iceberg_schema(rows.append(pa.field(partition_column, pa.string())))
        except NoSuchNamespaceError as error:
            namespace = ".".join(self._identifier[:-1])
            raise TableError(
                f"table {self.uri}: catalog {self._name!r} has no such namespace; create it first,"
                f" with `pyiceberg --catalog {self._name} create namespace {namespace}` or, in SQL,"
                f" `CREATE NAMESPACE {self._name}.{namespace}`"
            ) from error
        field: Any = PartitionField(
            source_id=schema.find_field(partition_column).field_id,
            field_id=PARTITION_FIELD_ID_START,
            transform=IdentityTransform(),
            name=partition_column,
        )
        return schema, PartitionSpec(field)

    def create(self, rows: pa.Schema, partition_column: str) -> Table:
        """Create the table for such rows, with a further partition column of strings."""
        schema, spec = self.check_create(rows, partition_column)
        with iceberg_errors(self.uri):
            create = self._catalog.create_table_if_not_exists  # another writer may, just now
            return self._lasting(create(self._identifier, schema, partition_spec=spec))

    def _lasting(self, table: Table) -> Table:
        table.io = LentFileIO(table.io, self._lend)
        return table

    def _lend(self) -> FileIO:
        with iceberg_errors(self.uri, faults=()):
            return self._catalog.load_table(self._identifier).io

    def _open(self) -> Catalog:
        try:
            with iceberg_errors(self.uri, faults=(), passing=(ValueError, NotInstalledError)):
                catalog = load_catalog(self._name)
        except (ValueError, NotInstalledError) as error:
            text, cause = without_secrets(error, self.uri)
            prefix = f"PYICEBERG_CATALOG__{self._name.upper()}__"
            raise SpecError(
                f"table {self.uri}: catalog {self._name!r} can't be set up from pyiceberg's"
                f" configuration: {text}. Describe it in .pyiceberg.yaml, or by environment"
                f" variables such as {prefix}TYPE=rest and {prefix}URI=https://..."
            ) from cause
        self._close = weakref.finalize(self, catalog.close)  # a SQL catalog keeps connections open
        return catalog


@contextmanager
def iceberg_errors(
    uri: str,
    *,
    faults: tuple[type[Exception], ...] = _FAULTS_OF_THE_TABLE,
    passing: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """pyiceberg's errors as ours: `faults` as `TableError`, all but `passing` as `StorageError`."""
    try:
        yield
    except passing:
        raise
    except Exception as error:  # each catalog (SQL, REST, Glue, Hive) has its own
        text, cause = without_secrets(error, uri)
        if isinstance(error, BatchLLMError):
            if cause is not None:
                raise
            raise type(error)(text) from None
        if isinstance(error, ModuleNotFoundError):  # of its file systems
            raise MissingLibraryError.of(error, f"table {uri}") from None
        if isinstance(error, faults):
            raise TableError(f"table {uri}: pyiceberg refuses it: {text}") from cause
        raise StorageError(
            f"table {uri}: its catalog or storage fails ({type(error).__name__}): {text}"
        ) from cause


def without_secrets(error: BaseException, uri: str) -> tuple[str, BaseException | None]:
    """The error's masked message on one line, and the error; None if its traceback has secrets.

    Secrets are those of the environment and of pyiceberg's settings for the catalog of `uri`.
    """
    settings = Config().get_catalog_config(TableAddress.parse(uri).catalog) or {}
    masker = Masker.of(os.environ, settings)
    shown = "".join(traceback.format_exception(error))
    text = " ".join(masker(str(error)).split())
    return text, error if masker(shown) == shown else None
