"""Plans and commits on Spark Connect, with a server that pyspark starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, fake_spec, job_fields

from batchllm_operator.errors import ERROR_MARK, ExitCode
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def batchllm(command: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "batchllm_operator", command, *args, "--on", "spark"],
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    rows = pa.Table.from_pylist(document_rows(12, 10))
    pq.write_table(rows, folder / "a.parquet", row_group_size=25)
    planner = {"num_shards": 3, "spark": {"conf": {"spark.remote": "local[2]"}}}
    output = {"uri": f"delta+{tmp_path}/out", "staging_uri": f"{tmp_path}/staging"}
    return job_fields(str(tmp_path), planner=planner, output=output)


def test_a_job_is_planned_and_committed(tmp_path: Path, fields: dict[str, Any]) -> None:
    planned = batchllm("plan", "--job-json", json.dumps(fields), "--ds", DS)
    assert planned.returncode == 0, planned.stderr
    (folder,) = (tmp_path / "staging").rglob("plan-*")
    run_worker(folder)
    committed = batchllm("commit", "--plan", str(folder))
    assert committed.returncode == 0, committed.stderr
    table = open_table(fields["output"]["uri"], "ds")
    rows = pa.Table.from_batches(table.scan(table.snapshot(DS), ["row_key", "query"])).to_pylist()
    assert rows == [
        {"row_key": row["row_key"], "query": row["query"]} for row in document_rows(12, 10)
    ]
    local = plan_job(
        fake_spec(tmp_path, planner={"num_shards": 3}, output={"uri": f"{tmp_path}/local"}), DS
    )
    plan = StoredPlan.open(str(folder))
    assert plan.manifest.counts == local.manifest.counts


def test_an_error_in_a_task_ends_the_command_as_it_does_locally(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    file = tmp_path / "documents" / f"ds={DS}" / "a.parquet"
    rows = pq.read_table(file)
    queries = [*map(str.encode, rows["query"].to_pylist()[:-1]), b"\xff"]
    place = rows.schema.get_field_index("query")
    broken = pa.array(queries).cast(pa.string(), safe=False)
    pq.write_table(rows.set_column(place, "query", broken), file)
    planned = batchllm("plan", "--job-json", json.dumps(fields), "--ds", DS)
    assert planned.returncode == ExitCode.INVALID, planned.stderr
    error = planned.stderr.splitlines()[-1]  # above it the server, here the same process, logs
    assert error.startswith(f"{ERROR_MARK}table {tmp_path}/documents, partition {DS!r}: column")
    assert "isn't valid UTF-8 in row 119" in error
    assert not (tmp_path / "staging").exists() or not list(
        (tmp_path / "staging").rglob("*.parquet")
    )
