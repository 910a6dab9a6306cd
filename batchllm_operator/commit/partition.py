"""The published partition's rows, in files."""

from collections.abc import Sequence
from pathlib import Path

from batchllm_operator.lake import LakeTable, gather, write_files
from batchllm_operator.shards.buckets import Outputs
from batchllm_operator.shards.joining import Joining
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def write_partition(
    plan: StoredPlan, sources: Sequence[Outputs], spool: Path, table: LakeTable
) -> Path:
    """Write the partition's rows, in input order, to files in a folder; returns the folder.

    Memory is one bucket of rows and two row groups, whatever the number of rows; see `spread` and
    `write_files`. The local folder `spool` holds both; `table` tells how large a file may be.
    Raises `PlanError`: a row has no output, or more than one.
    """
    joining, most = Joining(plan, sources), table.most_file_bytes
    tables = gather(joining.all_tables(plan, sources, spool), most)
    write_files(tables, spool / "data", joining.schema, most)
    return spool / "data"
