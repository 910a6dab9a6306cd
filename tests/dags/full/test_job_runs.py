"""`airflow dags test`: runs that fail, skip, and are killed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import DS, JobFolder, job_fields
from support.fork_server import ForkServer
from support.standalone import bundle

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import load_spec

ROOT = Path(__file__).parents[3]
BUNDLES = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
EVENTS = "lineage.jsonl"
NOTHING = {"filter": [{"column": "query", "value": "no such query"}]}
DAG = """
from airflow.sdk import DAG, task
from batchllm_operator.operators import batchllm_task_group

with DAG("job", schedule=None) as dag:
    batchllm_task_group(**{arguments!r})
{more}
"""

ABSENT = """
    from batchllm_operator.operators import BatchLLMCommitOperator
    BatchLLMCommitOperator(task_id="absent", plan_uri={uri!r})
"""


@dataclass(frozen=True)
class Airflow:
    """An Airflow home with a database, and a server of `airflow` commands."""

    home: Path
    env: Mapping[str, str]
    server: ForkServer

    def command(self, *args: str) -> str:
        """What it prints; a RuntimeError with that if it fails."""
        run = self.server.run("airflow.__main__", args, env=self.env)
        if run.returncode != 0:
            raise RuntimeError(run.stdout + run.stderr)
        return run.stdout + run.stderr

    def run(self, dag_id: str = "job") -> str:
        """Run a DAG for `DS`; its log, or a RuntimeError with it when the run failed."""
        return self.command("dags", "test", dag_id, DS)

    def failure(self) -> str:
        """The log of a run of `job` that fails."""
        with pytest.raises(RuntimeError) as failure:
            self.run()
        return str(failure.value)

    def in_folder(self, dags: Path) -> Airflow:
        """The same with other DAGs."""
        bundles = json.dumps([bundle("dags-folder", path=str(dags))])
        return replace(self, env={**self.env, BUNDLES: bundles})

    def with_dag(self, job: JobFolder, *, more: str = "", **arguments: Any) -> Airflow:
        """This Airflow with one DAG, `job`: a task group with `arguments`, and no retries.

        `more` is code at the end of its file.
        """
        dags = job.path / "dags"
        dags.mkdir()
        (dags / "job.py").write_text(DAG.format(arguments=arguments, more=more))
        return self.in_folder(dags)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("airflow home")
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    env |= {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    transport = {"type": "file", "log_file_path": str(home / EVENTS), "append": True}
    env |= {"AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport)}
    server = ForkServer("support.airflow_imports", env=env)
    new = Airflow(home, env, server)
    new.command("db", "migrate")
    yield new
    server.close()


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    """A job folder of the test's own."""
    job = JobFolder(tmp_path)
    job.write_rows(DS)
    return job


def num_started(log: str) -> int:
    """Tasks that were started."""
    return log.count("starting task_id=")


def test_a_run_publishes_the_partition_and_another_leaves_it(
    airflow: Airflow, job: JobFolder
) -> None:
    job.write_spec("offline_ranking")
    env = {**airflow.env, "BATCHLLM_SPEC_DIR": str(job.path)}
    airflow = replace(airflow, env=env).in_folder(ROOT / "dags")
    log = airflow.run("offline_ranking")
    assert num_started(log) == 4  # plan, generate, commit, report
    job.check_published("offline_ranking")
    (file,) = job.partition("offline_ranking").iterdir()
    before = file.read_bytes()
    airflow.run("offline_ranking")
    assert file.read_bytes() == before


def test_a_branch_that_isnt_taken_skips_the_whole_job(airflow: Airflow, job: JobFolder) -> None:
    """And on the other branch a partition without rows is committed, without a shard."""
    spec = job.write_spec("job", on_empty="commit", input=NOTHING)
    branch = f"""
    @task.branch
    def branch():
        return "taken.plan"

    left = batchllm_task_group(spec_path={spec!r}, group_id="left")
    branch() >> [dag.task_group_dict["taken"], left]
"""
    log = airflow.with_dag(job, spec_path=spec, group_id="taken", more=branch).run()
    assert re.findall(r"Running batchllm (\w+)", log) == ["plan", "commit", "report"]
    assert num_started(log) == 5  # branch, plan, generate, commit, report
    assert job.published("job") == []


def test_a_failing_shard_keeps_commit_from_publishing(airflow: Airflow, job: JobFolder) -> None:
    spec = job.write_spec("job")
    outputs = Path(plan_job(load_spec(Path(spec)), DS).folder.path) / "runs"
    outputs.mkdir()
    (outputs / "shard-00001").write_text("A file in the place of a folder.")
    log = airflow.with_dag(job, spec_path=spec).failure()
    assert num_started(log) == 2  # plan, generate
    assert not job.partition("job").exists()


def test_a_failing_report_leaves_the_partition_published(airflow: Airflow, job: JobFolder) -> None:
    broken = '    dag.get_task("batchllm.report").env = {"PYTHONHOME": "/nowhere"}'
    log = airflow.with_dag(job, spec_path=job.write_spec("job"), more=broken).failure()
    assert num_started(log) == 4
    assert "batchllm report: " in log
    job.check_published("job")


def test_a_runs_lineage_reaches_the_transport_of_openlineage(
    airflow: Airflow, job: JobFolder
) -> None:
    """By Airflow's provider, for each task, and from input to output; all as the schemas say."""
    pytest.importorskip("airflow.providers.openlineage", reason="an extra of Airflow's")
    from support.openlineage import all_facets, check_event

    spec = job.write_spec("job", expect={"generated_text": {"empty": {"max": 0.5}}})
    absent = ABSENT.format(uri=f"{job.path}/absent/_batchllm/job/{DS}/plan-{'0' * 16}")
    with pytest.raises(RuntimeError):
        airflow.with_dag(job, spec_path=spec, output_asset="out", more=absent).run()
    lines = (airflow.home / EVENTS).read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if str(job.path) in json.dumps(event)]
    for event in events:
        check_event(event)
    assert {event["eventType"] for event in events} >= {"START", "COMPLETE", "FAIL"}
    ended = {event["job"]["name"]: event for event in events if event["eventType"] == "COMPLETE"}
    plan, commit = ended["job.batchllm.plan"], ended["job.batchllm.commit"]
    assert [each["name"] for each in plan["inputs"]] == [f"{job.path}/documents"]
    (read,), (written,) = commit["inputs"], commit["outputs"]
    assert (read["namespace"], read["name"]) == ("file", f"{job.path}/documents")
    assert (written["namespace"], written["name"]) == ("file", f"{job.path}/job")
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == 12
    assert "generated_text" in written["facets"]["columnLineage"]["fields"]
    assert commit["run"]["facets"]["batchllm_job"]["num_rows_out"] == 12
    assert {*all_facets(commit)} >= {
        *("batchllm_job", "inputStatistics", "outputStatistics", "schema", "version"),
        *("columnLineage", "dataQualityAssertions"),
    }


def test_a_task_may_return_the_spec(airflow: Airflow, job: JobFolder) -> None:
    """Its braces are the prompt's, not Jinja's."""
    fields = job_fields(str(job.path), prompt={"template": "{document} {{json}} {query}"})
    more = f"""
    @task
    def spec(ds=None):
        return {{**{fields!r}, "name": f"job_{{ds[:4]}}"}}

    batchllm_task_group(spec(), group_id="coded")
"""
    log = airflow.with_dag(job, spec_path="absent", group_id="left", more=more).failure()
    assert re.findall(r"Running batchllm (\w+)", log).count("commit") == 1
    (rows,) = (job.path / "out" / "_batchllm" / "job_2026" / DS).glob("plan-*/rows.parquet")
    assert rows.is_file() and len(list((job.path / "out" / f"ds={DS}").iterdir())) == 1
