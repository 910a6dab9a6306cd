"""Opens the table at an address, in its format."""

from __future__ import annotations

from importlib import import_module

from batchllm_operator.errors import MissingLibraryError, SpecError, TableError
from batchllm_operator.lake.table import LakeTable
from batchllm_operator.spec import TARGET_FILE_BYTES, TableAddress
from batchllm_operator.storage import Folder


def open_table(
    uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
) -> LakeTable:
    """The table at an address of the spec; a folder is opened in the format that lies there.

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
    table_format = _format_in(address) if address.format == "parquet" else address.format
    try:  # formats that aren't used aren't imported
        module = import_module(f"batchllm_operator.lake.{table_format}.table")
        table: LakeTable = module.open_at(address, partition_column, most_file_bytes)
        return table
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, f"table {uri}") from error


def _format_in(address: TableAddress) -> str:
    """The format of the table in a folder, whose address names none."""
    folder = Folder.open(address.location)
    if folder.exists("_delta_log"):
        return "delta"
    if any(name.endswith(".metadata.json") for name in folder.child("metadata").find()):
        raise TableError(
            f"table {address.uri}: an Iceberg table lies there; write"
            " iceberg://CATALOG/NAMESPACE.TABLE, as only its catalog knows which of its files count"
        )
    return "parquet"
