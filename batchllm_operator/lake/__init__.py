"""The data lake: tables to read and publish; `StorageError` when a storage or a catalog fails."""

from batchllm_operator.lake.data_files import gather as gather
from batchllm_operator.lake.data_files import write_files as write_files
from batchllm_operator.lake.parquet.table import ParquetTable as ParquetTable
from batchllm_operator.lake.parquet_footer import published_schema as published_schema
from batchllm_operator.lake.partition_order import NAME_ONE as NAME_ONE
from batchllm_operator.lake.partition_order import before as before
from batchllm_operator.lake.partition_order import in_order as in_order
from batchllm_operator.lake.partition_order import near as near
from batchllm_operator.lake.places import find_place as find_place
from batchllm_operator.lake.publishing import RUN_ID as RUN_ID
from batchllm_operator.lake.publishing import Publication as Publication
from batchllm_operator.lake.row_stream import joined as joined
from batchllm_operator.lake.scanning import listed_columns as listed_columns
from batchllm_operator.lake.scanning import row_condition as row_condition
from batchllm_operator.lake.scanning import rows_meeting as rows_meeting
from batchllm_operator.lake.schema import StoredColumns as StoredColumns
from batchllm_operator.lake.schema import check_names as check_names
from batchllm_operator.lake.staging import StagedFile as StagedFile
from batchllm_operator.lake.staging import StagedRows as StagedRows
from batchllm_operator.lake.staging import Staging as Staging
from batchllm_operator.lake.table import FilePart as FilePart
from batchllm_operator.lake.table import InputFile as InputFile
from batchllm_operator.lake.table import LakeTable as LakeTable
from batchllm_operator.lake.table import Snapshot as Snapshot
from batchllm_operator.lake.table import open_table as open_table
from batchllm_operator.lake.versioned import VersionedTable as VersionedTable
