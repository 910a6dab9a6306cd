"""What pages of this repository show: code, values, and the pods that come of them."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_chart.rendering import ROOT, Values, render

START = ROOT / "docs" / "start" / "kubernetes.md"
PAGE = ROOT / "docs" / "operate" / "kubernetes.md"
AIRFLOW = ROOT / "docs" / "operate" / "airflow.md"
MOUNTED_AT = "/opt/batchllm/pods"
REGISTRY = "registry.example.com/team"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    pieces = page.read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return [piece.partition("```")[0] for piece in pieces]


def shown_values() -> tuple[Any, Any, Any]:
    """Of our chart, of Airflow's, and of Airflow's for the example DAGs."""
    shown = [*blocks(START, "yaml"), *blocks(PAGE, "yaml")]
    ours, airflows, example_dags = (yaml.safe_load(block) for block in shown)
    return ours, airflows, example_dags


def pods_of(code: str, values: Values, folder: Path) -> dict[str, dict[str, Any]]:
    """The pods of the shown tasks that run in some, with the chart's templates, by task.

    Airflow is imported here, for it looks for its home when it is.
    """
    from airflow.sdk import DAG

    from batchllm_operator.operators import batchllm_task_group

    [config] = [each for each in render(values) if each.kind == "ConfigMap"]
    for name, template in config.content["data"].items():
        (folder / name).write_text(template, encoding="utf-8")
    with DAG("shown", schedule=None) as dag:
        names = {"batchllm_task_group": batchllm_task_group}
        exec(compile(code.replace(MOUNTED_AT, str(folder)), "a page", "exec"), names)
    generate: Any = dag.get_task("batchllm.generate")
    plan_uri = "s3://lake/out/_batchllm/job/ds/plan-0"
    worker = {"plan_uri": plan_uri, "worker": 0, "num_workers": 1}
    tasks: dict[str, Any] = {
        "plan": dag.get_task("batchllm.plan"),
        "generate": generate.unmap(worker),
    }
    return {name: _pod(task) for name, task in tasks.items() if task.runner == "kubernetes"}


def _pod(task: Any) -> dict[str, Any]:
    """As the API gets it, valid for a real one."""
    from kubernetes.client import ApiClient

    task.in_cluster = False
    pod = ApiClient().sanitize_for_serialization(task.build_pod_request_obj(dry_run=True))
    pod["metadata"]["name"] = "a-name"
    kubernetes_validate.validate(pod, "1.36", strict=True)
    return dict(pod)


def image_of(pod: dict[str, Any]) -> str:
    """The main container's."""
    return str(pod["spec"]["containers"][0]["image"])
