"""Runs that fail, that are killed, and that take credentials from a connection."""

import errno
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem
from support.demo_job import live_processes, wait_until
from support.fake_job import DS

Airflow = Job = Any  # the fixtures in conftest.py

KEY_ID, KEY, TOKEN = "AKIACANARY0KEYID", "canary/secret+key", "canary-session-token"


def test_an_empty_partition_that_should_not_be_runs_nothing_more(
    airflow: Airflow, job: Job
) -> None:
    nothing = {"filter": [{"column": "query", "value": "no such query"}]}
    spec = job.write_spec("job", on_empty="fail", input=nothing)
    with pytest.raises(RuntimeError) as failure:
        airflow.with_dag(job.folder / "dags", spec_path=str(spec)).run("job", job.folder)
    assert str(failure.value).count("starting task_id=") == 1
    assert not (job.folder / "job" / f"ds={DS}").exists()


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_a_failing_shard_keeps_commit_from_running(
    airflow: Airflow, job: Job, failing: tuple[int, ...]
) -> None:
    spec = job.write_spec("job")
    plan = (sys.executable, "-m", "batchllm_operator.cli", "plan", "--job", str(spec), "--ds", DS)
    subprocess.run(plan, check=True, capture_output=True)
    outputs = job.plan_folder("job") / "runs"
    outputs.mkdir()
    for shard in failing:
        (outputs / f"shard-0000{shard}").write_text("A file in the place of a folder.")

    with pytest.raises(RuntimeError) as failure:
        airflow.with_dag(job.folder / "dags", spec_path=str(spec)).run("job", job.folder)
    log = str(failure.value)
    assert log.count("starting task_id=") == 3
    assert (outputs / "shard-00000" / "report.json").exists() == (0 not in failing)
    assert "Running batchllm commit" not in log
    assert not (job.folder / "job" / f"ds={DS}").exists()


def test_a_failing_report_leaves_the_partition_published(airflow: Airflow, job: Job) -> None:
    spec = job.write_spec("job")
    broken = 'dag.get_task("batchllm.report").env = {"PYTHONHOME": "/nowhere"}'
    with pytest.raises(RuntimeError) as failure:
        airflow.with_dag(job.folder / "dags", spec_path=str(spec), more=broken).run(
            "job", job.folder
        )
    log = str(failure.value)
    assert log.count("starting task_id=") == 5
    assert "batchllm report: " in log
    rows = pq.ParquetFile(job.published("job")).read().to_pylist()
    assert sorted(row["id"] for row in rows) == job.keys()


def test_sigkill_while_planning_ends_the_command(airflow: Airflow, job: Job) -> None:
    spec = job.folder / "job.yaml"
    os.mkfifo(spec)  # `batchllm plan` waits in reading it
    task = airflow.with_dag(job.folder / "dags", spec_path=str(spec)).start("job", job.folder)
    writer = open_when_read(spec, task)
    task.kill()
    task.wait()
    poll = select.poll()
    poll.register(writer, 0)  # POLLERR: nobody reads any more
    assert poll.poll(60_000) == [(writer, select.POLLERR)]
    os.close(writer)


def open_when_read(fifo: Path, process: subprocess.Popen[bytes]) -> int:
    """Open `fifo` for writing as soon as something below `process` reads it."""
    while process.poll() is None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO  # no reader yet
            time.sleep(0.05)
    raise AssertionError(f"ended with exit code {process.returncode} before it read {fifo}")


def test_sigkill_while_generating_leaves_nothing_alive_and_a_rerun_resumes(
    airflow: Airflow, job: Job
) -> None:
    """Each request takes a while; the run is killed when the first of four parts is done."""
    spec = job.write_spec(
        "job",
        engine={"extra_args": {"delay_s": 0.3}},
        planner={"num_shards": 1, "part_rows": 3},
    )
    airflow = airflow.with_dag(job.folder / "dags", spec_path=str(spec))
    outputs = job.folder / "job" / "_batchllm" / "job" / DS

    def finished_parts() -> dict[Path, int]:
        """The file of each finished part, with the time of its last change."""
        entries = outputs.glob("plan-*/runs/shard-00000/*/part-?????.json")
        files = (entry.parent / json.loads(entry.read_bytes())["file"] for entry in entries)
        return {file: file.stat().st_mtime_ns for file in files}

    run = airflow.start("job", job.folder, start_new_session=True)
    try:
        wait_until(lambda: run.poll() is not None or finished_parts(), "a part is finished")
        assert run.poll() is None
        assert len(live_processes(run.pid)) > 1  # Airflow and the command that it started
        run.kill()
        run.wait()
        wait_until(lambda: not live_processes(run.pid), "its processes have ended", limit_s=20)
    finally:
        for pid in live_processes(run.pid):
            os.kill(pid, signal.SIGKILL)
    before = finished_parts()
    assert 0 < len(before) < 4  # it was cut off, and didn't come to its end
    assert not (job.folder / "job" / f"ds={DS}").exists()

    airflow.run("job", job.folder)
    report = json.loads((job.plan_folder("job") / "runs/shard-00000/report.json").read_bytes())
    assert (report["num_parts"], report["num_resumed_parts"]) == (4, len(before))
    assert before.items() <= finished_parts().items()  # not written again
    rows = pq.ParquetFile(job.published("job")).read().to_pylist()
    assert sorted(row["id"] for row in rows) == job.keys()
    assert all(row["error"] is None and row["generated_text"] for row in rows)


def test_credentials_come_from_a_connection_and_are_seen_nowhere(
    airflow: Airflow, job: Job, s3_bucket: str, s3_endpoint: str
) -> None:
    """The bucket can be reached with the connection only: nothing else names its endpoint."""
    s3 = S3FileSystem()
    s3.put(str(job.folder / "documents"), f"{s3_bucket}/documents", recursive=True)
    conn_id = f"lake_{uuid.uuid4().hex[:8]}"
    extra = {"aws_session_token": TOKEN, "region_name": "us-east-1", "endpoint_url": s3_endpoint}
    fields = {"conn_type": "aws", "login": KEY_ID, "password": KEY, "extra": extra}
    connections = job.folder / "connections.json"
    connections.write_text(json.dumps({conn_id: fields}))
    add = airflow.command("connections", "import", str(connections))
    subprocess.run(add, env=airflow.env, check=True, capture_output=True)
    job.write_spec(
        "job", input={"uri": f"{s3_bucket}/documents"}, output={"uri": f"{s3_bucket}/job"}
    )
    airflow = airflow.with_dag(
        job.folder / "dags", spec_path=str(job.folder / "job.yaml"), aws_conn_id=conn_id
    ).without_aws()

    log = airflow.run("job", job.folder)
    assert s3.exists(f"{s3_bucket}/job/ds={DS}")
    stored = stored_texts(airflow.home / "airflow.db")
    assert any(conn_id in text for text in stored)  # rendered templates are among them
    assert any(f"{s3_bucket}/job/_batchllm" in text for text in stored)  # and XComs
    files = [f for f in airflow.home.rglob("*") if f.is_file() and "airflow.db" not in f.name]
    shown = [log, *stored, *(file.read_text(errors="replace") for file in files)]
    for canary in (KEY_ID, KEY, TOKEN):
        assert [text for text in shown if canary in text] == []


def stored_texts(database: Path) -> list[str]:
    """The rows of all tables of Airflow's database but that of the connections."""
    with closing(sqlite3.connect(database)) as db:
        tables = [
            name for (name,) in db.execute("select name from sqlite_master where type='table'")
        ]
        assert "connection" in tables
        return [
            repr(row)
            for table in tables
            if table != "connection"
            for row in db.execute(f'select * from "{table}"')
        ]
