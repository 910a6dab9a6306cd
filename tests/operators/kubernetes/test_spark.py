"""Planning by a SparkApplication: Airflow's operator, a double of Spark's, real drivers in pods."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from support.fake_job import DS, document_rows, job_fields, write_table
from support.kubernetes.cluster import Cluster
from support.pod_arguments import pod_arguments
from support.pod_shards import Shards, in_worker
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators.spark import BatchLLMSparkKubernetesPlanOperator

CONTAINER = BatchLLMSparkKubernetesPlanOperator.BASE_CONTAINER_NAME


class SparkOperator:
    """The custom objects of Kubeflow's Spark operator, and what it does: a driver's pod for each.

    The driver runs `batchllm` with the application's arguments, as `spark_driver.py` does. Its
    executors are threads of its own.
    """

    def __init__(self, cluster: Cluster, lake: Path) -> None:
        self._cluster, self._lake = cluster, lake
        self.applications: dict[str, dict[str, Any]] = {}
        self.made: list[dict[str, Any]] = []

    def create_namespaced_custom_object(self, *, body: dict[str, Any], **where: str) -> Any:
        assert where["plural"] == "sparkapplications"
        assert (where["group"], where["version"]) == ("sparkoperator.k8s.io", "v1beta2")
        name, spec = body["metadata"]["name"], body["spec"]
        template = pod_arguments(self._cluster, self._lake)["pod_template_dict"]["spec"]
        container = template["containers"][0] | {
            "name": CONTAINER,
            "image": spec["image"],
            "command": ["batchllm"],
            "args": spec["arguments"],
        }
        pod = {
            "metadata": {
                "name": f"{name}-driver",
                "labels": {**spec["driver"]["labels"], "spark-role": "driver"},
            },
            "spec": {
                "restartPolicy": "Never",
                "containers": [container],
                "volumes": template["volumes"],
            },
        }
        self._cluster.api.create_namespaced_pod(where["namespace"], pod)
        self.applications[name] = body
        self.made.append(body)
        return body

    def get_namespaced_custom_object_status(self, *, name: str, **where: str) -> Any:
        phase = self._cluster.phase(f"{name}-driver")
        state = {"Pending": "SUBMITTED", "Succeeded": "COMPLETED"}.get(phase, phase.upper())
        return {"status": {"applicationState": {"state": state, "errorMessage": "exit code 1"}}}

    def delete_namespaced_custom_object(self, *, name: str, **where: str) -> None:
        if self.applications.pop(name, None) is not None:
            self._cluster.api.delete_namespaced_pod(f"{name}-driver", where["namespace"])


@pytest.fixture
def spec(shards: Shards) -> Path:
    write_table(shards.lake / "documents", document_rows())
    path = shards.lake / "job.yaml"
    conf = {
        "spark.master": "local[2]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
    }
    changes = {"prompt": {"system": 'Answer "$(HOME)" and $$5. '}}
    planner = {"engine": "spark", "spark": {"conf": conf}}
    path.write_text(yaml.safe_dump(job_fields(str(shards.lake), planner=planner, **changes)))
    return path


@pytest.fixture
def spark_operator(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> SparkOperator:
    double = SparkOperator(shards.cluster, shards.lake)
    monkeypatch.setattr(BatchLLMSparkKubernetesPlanOperator, "custom_obj_api", double)
    return double


def application(folder: Path, namespace: str) -> Path:
    path = folder / "spark.yaml"
    body = {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": {"namespace": namespace},
        "spec": {
            "type": "Python",
            "mode": "cluster",
            "image": "job:1",
            "driver": {"cores": 1, "memory": "1g", "labels": {"team": "search"}},
            "executor": {"instances": 1, "cores": 1, "memory": "1g"},
        },
    }
    path.write_text(yaml.safe_dump(body))
    return path


def plan_run(shards: Shards, spec: Path, file: Path, ti: TaskInstance, **options: Any) -> TaskRun:
    def make() -> BatchLLMSparkKubernetesPlanOperator:
        return BatchLLMSparkKubernetesPlanOperator(
            task_id="plan",
            spec_path=str(spec),
            ds=DS,
            application_file=str(file),
            config_file=str(shards.cluster.kubeconfig),
            kubernetes_conn_id=None,
            **options,
        )

    run = TaskRun(make, ti, "sync")
    shards.runs.append(run)
    return run


@in_worker
def test_a_driver_plans_and_the_lake_decides(
    shards: Shards, spec: Path, spark_operator: SparkOperator
) -> None:
    ti = TaskInstance(task_id="plan")
    file = application(shards.lake, shards.cluster.namespace)
    value = plan_run(shards, spec, file, ti).wait()
    uri = ti.pushed["plan_uri"]
    assert value["plan_uri"] == uri
    assert ti.pushed["plan"]["num_rows"] == 30
    manifest = yaml.safe_load((Path(uri) / "manifest.json").read_text())
    assert manifest["spec"]["prompt"]["system"] == 'Answer "$(HOME)" and $$5. '
    (made,) = spark_operator.made
    assert made["metadata"]["name"].startswith("batchllm-job-plan")
    assert made["metadata"]["namespace"] == shards.cluster.namespace
    assert made["spec"]["driver"]["labels"]["team"] == "search"
    assert "arguments" not in yaml.safe_load(file.read_text())["spec"]
    shards.check_nothing_left()


@in_worker
def test_a_driver_that_fails_fails_the_task(
    shards: Shards, spec: Path, spark_operator: SparkOperator
) -> None:
    (shards.lake / "documents" / f"ds={DS}" / "a.parquet").unlink()
    file = application(shards.lake, shards.cluster.namespace)
    error = plan_run(shards, spec, file, TaskInstance(task_id="plan")).failure()
    assert isinstance(error, AirflowException)
    shards.check_nothing_left()


@in_worker
def test_a_killed_task_removes_its_application(
    shards: Shards, spec: Path, spark_operator: SparkOperator
) -> None:
    file = application(shards.lake, shards.cluster.namespace)
    run = plan_run(shards, spec, file, TaskInstance(task_id="plan"))
    shards.wait(lambda: [p for p in shards.live() if p.status.phase == "Running"], "the driver")
    run.task.on_kill()
    run.failure()
    shards.check_nothing_left()
    assert not list((shards.lake / "out").glob("_batchllm/*/*/plan-*/manifest.json"))


@in_worker
def test_a_file_that_is_no_application_is_refused(
    shards: Shards, spec: Path, spark_operator: SparkOperator
) -> None:
    file = shards.lake / "spark.yaml"
    for text in ("kind: SparkApplication\n", "spec: 7\n", "- 1\n"):
        file.write_text(text)
        error = plan_run(shards, spec, file, TaskInstance(task_id="plan")).failure()
        assert isinstance(error, AirflowFailException), text
        assert str(file) in str(error)
    assert not spark_operator.made


def test_it_isnt_deferrable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="deferrable"):
        BatchLLMSparkKubernetesPlanOperator(
            task_id="plan", spec_path="job.yaml", application_file="spark.yaml", deferrable=True
        )
