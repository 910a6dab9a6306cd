"""Opens the table at an address, in its format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from batchllm_operator.errors import MissingLibraryError, SpecError, TableError
from batchllm_operator.lake.parquet.table import ParquetTable
from batchllm_operator.lake.table import LakeTable
from batchllm_operator.spec import TARGET_FILE_BYTES, TableAddress
from batchllm_operator.storage.folder import Folder

_DELTA_LOG: Final = "_delta_log"
_ICEBERG_METADATA: Final = "metadata"


def open_table(
    uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
) -> LakeTable:
    """The table at an address of the spec; a folder is opened in the format found there.

    `most_file_bytes` bounds published data files, in formats that allow several per partition.

    Raises:
        SpecError: the address isn't one, or no catalog or storage of its kind is set up.
        MissingLibraryError: the format's library isn't installed.
        TableError: an Iceberg table's folder is addressed without its catalog.
    """
    try:
        address = TableAddress.parse(uri)
    except ValueError as error:
        raise SpecError(f"{uri}: {error}") from error
    if address.format == "iceberg":
        with _library(uri):
            from batchllm_operator.lake.iceberg.table import IcebergTable

            return IcebergTable(address, partition_column, most_file_bytes)
    folder = Folder.open(address.location)
    if address.format == "delta" or folder.exists(_DELTA_LOG):
        with _library(uri):
            from batchllm_operator.lake.delta.table import DeltaTable

            return DeltaTable(folder.uri, partition_column, most_file_bytes)
    if any(name.endswith(".metadata.json") for name in folder.child(_ICEBERG_METADATA).find()):
        raise TableError(
            f"table {uri}: an Iceberg table lies there; write iceberg://CATALOG/NAMESPACE.TABLE, as"
            " only its catalog knows which of its files count"
        )
    return ParquetTable(folder, partition_column)


@contextmanager
def _library(uri: str) -> Iterator[None]:
    """Raise an error that says how to install a format's library if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, f"table {uri}") from error
