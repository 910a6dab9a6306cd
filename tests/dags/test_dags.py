"""The DAG files as Airflow sees them. Airflow runs in processes of its own, with its own home."""

import errno
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchllm_operator.spec import load_spec

ROOT = Path(__file__).parents[2]

PARSE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(sys.argv[1])
heavy = {"vllm", "torch", "pyarrow", "transformers", "tokenizers", "numba", "numpy", "pandas"}
dags = {
    dag.dag_id: {
        "tasks": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
        "spec_path": next(task.spec_path for task in dag.tasks if hasattr(task, "spec_path")),
        "catchup": dag.catchup,
        "max_active_runs": dag.max_active_runs,
        "retries": min(task.retries for task in dag.tasks),
    }
    for dag in bag.dags.values()
}
print(json.dumps({
    "errors": {str(k): v for k, v in bag.import_errors.items()},
    "heavy": sorted(heavy & set(sys.modules)),
    "dags": dags,
}))
"""


def test_dag_files_import_without_errors_and_without_heavy_modules(
    airflow_env: dict[str, str],
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PARSE, str(ROOT / "dags")],
        env=airflow_env,
        capture_output=True,
        text=True,
        check=True,
    )
    parsed = json.loads(run.stdout.splitlines()[-1])
    assert parsed["errors"] == {}
    assert parsed["heavy"] == []
    assert sorted(parsed["dags"]) == ["daily_snippets", "offline_ranking"]
    for dag_id, group in (("daily_snippets", "snippets"), ("offline_ranking", "ranking")):
        dag = parsed["dags"][dag_id]
        assert dag["tasks"] == {
            f"{group}.plan": [f"{group}.commit", f"{group}.generate"],
            f"{group}.generate": [f"{group}.commit"],
            f"{group}.commit": [],
        }
        assert dag["spec_path"] == str(ROOT / "dags" / "specs" / f"{dag_id}.yaml")
        assert (dag["catchup"], dag["max_active_runs"]) == (False, 1)
        assert dag["retries"] > 0


@pytest.mark.parametrize("name", ["daily_snippets", "offline_ranking"])
def test_the_dags_specs_are_valid(name: str) -> None:
    spec = load_spec(ROOT / "dags" / "specs" / f"{name}.yaml")
    assert spec.name == name
    assert spec.input.uri == str(ROOT / ".demo" / "lake" / "documents")
    assert spec.model.path == str(ROOT / ".demo" / "model")
    assert spec.sampling.is_greedy


@pytest.mark.parametrize(("dag_id", "num_reruns"), [("daily_snippets", 1), ("offline_ranking", 0)])
def test_a_dag_run_publishes_the_partition(
    airflow_env: dict[str, str], job: Path, dag_id: str, num_reruns: int
) -> None:
    log = run_dag(airflow_env, job, dag_id)
    assert log.count("starting task_id=") == 4  # plan, two shards, commit
    (published,) = (job / dag_id / f"ds={DS}").iterdir()
    rows = pq.ParquetFile(published).read().to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(f"{d}-{q}" for d in range(4) for q in "012")
    assert all(row["error"] is None and row["generated_text"] for row in rows)

    before = published.read_bytes()
    for _ in range(num_reruns):  # harmless
        run_dag(airflow_env, job, dag_id)
        assert published.read_bytes() == before


def test_an_empty_partition_skips_generate_and_commits(
    airflow_env: dict[str, str], job: Path
) -> None:
    spec = yaml.safe_load((job / "daily_snippets.yaml").read_text())
    spec["on_empty"] = "commit"
    spec["input"]["filter"] = [{"column": "query", "value": "no such query"}]
    write_spec(job / "daily_snippets.yaml", spec)
    log = run_dag(airflow_env, job, "daily_snippets")
    assert log.count("starting task_id=") == 2
    (published,) = (job / "daily_snippets" / f"ds={DS}").iterdir()
    assert pq.ParquetFile(published).metadata.num_rows == 0


def test_a_wrong_spec_fails_the_run_at_once_with_its_reason(
    airflow_env: dict[str, str], job: Path
) -> None:
    spec = yaml.safe_load((job / "daily_snippets.yaml").read_text())
    spec["prompt"]["template"] = "{no_such_column}"
    write_spec(job / "daily_snippets.yaml", spec)
    with pytest.raises(RuntimeError) as failure:
        run_dag(airflow_env, job, "daily_snippets")
    log = str(failure.value)
    assert log.count("starting task_id=") == 1  # no retry, no generate
    assert "no_such_column" in log
    assert not (job / "daily_snippets" / f"ds={DS}").exists()


def test_sigkill_of_the_airflow_task_ends_the_command(
    airflow_env: dict[str, str], job: Path
) -> None:
    spec = job / "daily_snippets.yaml"
    spec.unlink()
    os.mkfifo(spec)  # `batchllm plan` waits in reading it
    task = subprocess.Popen(
        [*AIRFLOW, "dags", "test", "daily_snippets", DS],
        env=airflow_env | {"BATCHLLM_SPEC_DIR": str(job)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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
