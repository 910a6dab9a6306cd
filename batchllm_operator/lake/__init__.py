"""The data lake: tables to read and publish, folders to keep plans and parts in."""

from batchllm_operator.lake.data_files import gather, write_files
from batchllm_operator.lake.folder import Folder
from batchllm_operator.lake.many_files import (
    StoredFile,
    ahead,
    hash_files,
    list_files,
    read_files,
    remove_files,
)
from batchllm_operator.lake.opening import open_table
from batchllm_operator.lake.parquet.table import ParquetTable
from batchllm_operator.lake.parquet_footer import published_schema
from batchllm_operator.lake.scanning import listed_columns, row_condition
from batchllm_operator.lake.table import InputFile, LakeTable, Publication, Snapshot

__all__ = [
    "Folder",
    "InputFile",
    "LakeTable",
    "ParquetTable",
    "Publication",
    "Snapshot",
    "StoredFile",
    "ahead",
    "gather",
    "hash_files",
    "list_files",
    "listed_columns",
    "open_table",
    "published_schema",
    "read_files",
    "remove_files",
    "row_condition",
    "write_files",
]
