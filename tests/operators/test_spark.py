"""Planning on Spark as a task: by `spark-submit`, on two cores of this machine."""

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import DAG
from support.fake_job import DS, document_rows, write_job, write_table
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators import batchllm_task_group
from batchllm_operator.operators.planning import Planning
from batchllm_operator.operators.spark import (
    APPLICATION,
    BatchLLMSparkKubernetesPlanOperator,
    BatchLLMSparkSubmitPlanOperator,
)
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import load_spec
from batchllm_operator.web.runs import PLANS

pytestmark = pytest.mark.filterwarnings(  # the provider doesn't close the pipe of spark-submit
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
CONF = {
    "spark.master": "local[2]",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
}


@pytest.fixture(autouse=True)
def _closed_pipes() -> Iterator[None]:
    """Each pipe is closed in the test that left it."""
    yield
    gc.collect()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that `spark-submit` of this environment plans, with this Python."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    connection = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_HERE", json.dumps(connection))
    write_table(tmp_path / "lake" / "documents", document_rows())
    return write_job(tmp_path, tmp_path / "lake", prompt={"system": 'Answer "$(HOME)" and $$5. '})


def submitted(spec: Path, ti: TaskInstance, **options: Any) -> TaskRun:
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    arguments = {"env": environment, "conn_id": "spark_here", "conf": CONF, "ds": DS} | options

    def make() -> BatchLLMSparkSubmitPlanOperator:
        return BatchLLMSparkSubmitPlanOperator(task_id="plan", spec_path=str(spec), **arguments)

    return TaskRun(make, ti, "sync")


def test_a_plan_by_spark_submit_is_the_tasks_value(
    spec: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ti = TaskInstance(task_id="plan")
    before = dict(os.environ)
    value = submitted(spec, ti, env={"PYSPARK_PYTHON": sys.executable}).wait()
    assert dict(os.environ) == before
    uri = ti.pushed["plan_uri"]
    assert value == ti.pushed["plan"]
    assert ti.pushed["plan"]["num_rows"] == 30
    assert ti.pushed["num_workers"] == value["num_shards"]
    manifest = json.loads((Path(uri) / "manifest.json").read_text())
    assert manifest["spec"]["prompt"]["system"] == 'Answer "$(HOME)" and $$5. '
    local = plan_job(load_spec(spec), DS).manifest
    assert manifest["counts"]["num_rows"] == local.counts.num_rows
    assert manifest["counts"]["num_requests"] == local.counts.num_requests


def test_what_no_retry_mends_fails_at_once(spec: Path, tmp_path: Path) -> None:
    """The driver's exit code says so; the reason is in the log."""
    write_table(tmp_path / "lake" / "documents", [{"row_key": "a", "document": "no query"}])
    error = submitted(spec, TaskInstance(task_id="plan")).failure()
    assert isinstance(error, AirflowFailException)
    assert "'query'" in str(error) and "exit code 2" in str(error)


def test_a_driver_that_ends_well_without_a_record_is_no_success(spec: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.py"
    nothing.write_text("")
    error = submitted(spec, TaskInstance(task_id="plan"), application=str(nothing)).failure()
    assert isinstance(error, AirflowException) and not isinstance(error, AirflowFailException)
    assert "planning hasn't come to its end" in str(error)


def test_the_task_group_takes_the_operator_for_its_arguments(spec: Path) -> None:
    kinds: dict[Any, dict[str, Any]] = {
        BatchLLMSparkSubmitPlanOperator: {"conn_id": "spark_here", "num_executors": 8},
        BatchLLMSparkKubernetesPlanOperator: {"application_file": "/none/spark.yaml"},
    }
    for kind, arguments in kinds.items():
        with DAG("job", schedule=None) as dag:
            plan_args = {"runner": "spark", **arguments}
            batchllm_task_group(spec, lake_conn_id="lake", plan_args=plan_args)
        plan = dag.get_task("batchllm.plan")
        assert type(plan) is kind and plan.task_type in PLANS
        assert plan.lake_conn_id == "lake"
        assert plan.report_root is not None
        assert set(Planning.planning_fields) <= set(plan.template_fields)
        assert plan.downstream_task_ids == {
            "batchllm.generate",
            "batchllm.commit",
            "batchllm.report",
        }


def test_credentials_are_in_the_drivers_environment_and_not_in_its_command(
    spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connection = {"conn_type": "aws", "login": "AKIA1", "password": "key-of-the-lake"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(connection))
    seen = tmp_path / "seen.json"
    program = tmp_path / "spark-submit"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(seen)!r}, 'w').write(json.dumps([sys.argv, dict(os.environ)]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    submitted(spec, TaskInstance(task_id="plan"), lake_conn_id="lake").failure()
    argv, environment = json.loads(seen.read_text())
    assert environment["AWS_SECRET_ACCESS_KEY"] == "key-of-the-lake"
    assert environment["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert "key-of-the-lake" not in " ".join(argv)
    where = argv.index(APPLICATION)
    assert argv[where + 1 : where + 4] == ["plan", "--on", "spark"]
    assert argv[argv.index("--name") + 1] == "batchllm-job-plan"


@pytest.mark.parametrize("name", ["application_args", "env_vars", "java_class"])
def test_arguments_of_its_own_are_refused(spec: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BatchLLMSparkSubmitPlanOperator(task_id="plan", spec_path=str(spec), **{name: "x"})
