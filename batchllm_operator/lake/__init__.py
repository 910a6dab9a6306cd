"""The data lake: tables to read and publish, folders to keep plans and parts in."""

from batchllm_operator.lake.folder import Folder
from batchllm_operator.lake.many_files import hash_files, read_files, remove_files
from batchllm_operator.lake.parquet import ParquetTable, published_schema
from batchllm_operator.lake.table import InputFile, LakeTable, Snapshot

__all__ = [
    "Folder",
    "InputFile",
    "LakeTable",
    "ParquetTable",
    "Snapshot",
    "hash_files",
    "open_table",
    "published_schema",
    "read_files",
    "remove_files",
]


def open_table(uri: str, partition_column: str) -> LakeTable:
    """The table at `uri`. Parquet is the only format so far."""
    return ParquetTable(Folder.open(uri), partition_column)
