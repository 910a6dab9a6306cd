"""An Airflow of the tests' own. It runs in processes of its own, as `airflow dags test`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.fake_job import without_model
from support.kubernetes.fixtures import kubernetes_backend

__all__ = ["airflow", "job", "kubernetes_backend", "make_job"]

ROOT = Path(__file__).parents[2]
DS = "2026-01-31"

_DAG = """
from airflow.sdk import DAG
from batchllm_operator.operators import batchllm_task_group

with DAG("job", schedule=None) as dag:
    batchllm_task_group(**{arguments!r})
{more}
"""


@dataclass(frozen=True)
class Airflow:
    """An Airflow home with a database, and the environment of its processes."""

    home: Path
    env: Mapping[str, str]

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "airflow", *args]

    def start(self, dag_id: str, job: Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a run of a DAG for `DS`; its output is dropped."""
        return subprocess.Popen(
            self.command("dags", "test", dag_id, DS),
            env={**self.env, "BATCHLLM_SPEC_DIR": str(job)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **options,
        )

    def run(self, dag_id: str, job: Path) -> str:
        """Run a DAG for `DS`; its log, or a RuntimeError with it when the run failed."""
        run = subprocess.run(
            self.command("dags", "test", dag_id, DS),
            env={**self.env, "BATCHLLM_SPEC_DIR": str(job)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise RuntimeError(run.stdout)
        return run.stdout

    def with_dag(self, folder: Path, *, more: str = "", **arguments: Any) -> Airflow:
        """This Airflow with one DAG, `job`: a task group with `arguments`, and no retries.

        `more` is code at the end of its file.
        """
        folder.mkdir()
        (folder / "job.py").write_text(_DAG.format(arguments=arguments, more=more))
        return Airflow(self.home, {**self.env, "AIRFLOW__CORE__DAGS_FOLDER": str(folder)})

    def without_aws(self) -> Airflow:
        """This Airflow on a machine that has no AWS credentials or settings."""
        env = {name: value for name, value in self.env.items() if not name.startswith("AWS_")}
        env |= {
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return Airflow(self.home, env)


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """An Airflow with the DAGs of this repository."""
    home = tmp_path_factory.mktemp("airflow home")
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    env |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    new = Airflow(home, env)
    subprocess.run(new.command("db", "migrate"), env=env, check=True, capture_output=True)
    return new


@dataclass(frozen=True)
class Job:
    """A folder with a lake table of twelve rows and job specs, on the engine without a model."""

    folder: Path

    def keys(self, num_documents: int = 4) -> list[str]:
        """The keys of all rows, sorted."""
        return sorted(
            f"{document}-{query}" for document in range(num_documents) for query in range(3)
        )

    def write_table(self, ds: str = DS, num_documents: int = 4) -> None:
        """Write a partition, or write it anew."""
        partition = self.folder / "documents" / f"ds={ds}"
        partition.mkdir(parents=True, exist_ok=True)
        rows = [
            {"id": f"{d}-{q}", "document": f"Document {d}. " * 9, "query": f"Query {q}?"}
            for d in range(num_documents)
            for q in range(3)
        ]
        pq.write_table(pa.Table.from_pylist(rows), partition / "part-0.parquet")

    def write_spec(self, name: str, **changes: Any) -> Path:
        """A spec; `changes` add to its sections or replace its fields."""
        spec: dict[str, Any] = {
            "spec_version": 1,
            "name": name,
            "input": {"uri": "documents", "key": "id"},
            "prompt": {"template": "{document}\n{query}"},
            "model": {"path": "./model"},
            "output": {"uri": name},
            "engine": {"backend": "fake"},
            "planner": {"num_shards": 2},
        }
        for section, value in changes.items():
            old = spec.get(section)
            merge = isinstance(old, Mapping) and isinstance(value, Mapping)
            spec[section] = {**old, **value} if merge else value
        spec = without_model(spec)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def published(self, name: str, ds: str = DS) -> Path:
        """The one file of the output partition."""
        (file,) = (self.folder / name / f"ds={ds}").iterdir()
        return file

    def plan_folder(self, name: str, ds: str = DS) -> Path:
        """The folder of the only plan."""
        (folder,) = (self.folder / name / "_batchllm").glob(f"{name}/{ds}/plan-*")
        return folder


def new_job(folder: Path) -> Job:
    """A lake table, and the specs of the DAGs of this repository."""
    folder.mkdir(exist_ok=True)
    new = Job(folder)
    new.write_table()
    for name in ("daily_snippets", "offline_ranking"):
        new.write_spec(name)
    return new


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job folder of the test's own."""
    return new_job(tmp_path)


@pytest.fixture(scope="session")
def make_job() -> Callable[[Path], Job]:
    """For fixtures that need a job folder for longer than a test."""
    return new_job
