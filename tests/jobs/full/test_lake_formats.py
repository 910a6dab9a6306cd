"""Partitions larger than a file, in each format."""

import random

import pyarrow as pa
from jobs.test_lake_formats import input_rows, read, run_job, spec_of
from support.fake_job import DS
from support.lake_tables import Lake, open_lake

from batchllm_operator.commit.commit_run import commit_run


def test_large_partitions_are_files_of_the_size_asked_for(lakes: tuple[Lake, Lake]) -> None:
    """Of Iceberg and Delta; a Parquet partition is one file, which is replaced in one step."""
    most = 1 << 20
    randoms = random.Random(0)
    rows = [{**row, "blob": randoms.randbytes(7000).hex()[:7000]} for row in input_rows(60, 10)]
    lakes[0].append(DS, pa.Table.from_pylist(rows))
    spec = spec_of(lakes, carry=["blob"], target_file_bytes=most)
    before: set[str] = set()
    for carry in (["blob"], ["blob", "query"]):
        plan = run_job(spec_of(lakes, carry=carry, target_file_bytes=most, add_columns=True))
        commit_run(plan.folder.uri)
        snapshot = open_lake(lakes[1]).snapshot(DS)
        sizes = [file.size_bytes for file in snapshot.files]
        if spec.output.uri.startswith(("iceberg", "delta")):
            assert len(sizes) >= 3 and max(sizes) <= most, sizes
        else:
            assert len(sizes) == 1 and sizes[0] > most
        assert before.isdisjoint(file.name for file in snapshot.files) or len(sizes) == 1
        before = {file.name for file in snapshot.files}
        found = read(lakes[1], ["row_key", "number", "blob", "run_id"])
        assert [(row["row_key"], row["number"], row["blob"]) for row in found] == [
            (row["row_key"], row["number"], row["blob"]) for row in rows
        ]
        assert {row["run_id"] for row in found} == {plan.publication.run_id}
        assert commit_run(plan.folder.uri).num_rows_out == 600
        assert open_lake(lakes[1]).snapshot(DS) == snapshot, "nothing was left to do"
