"""The DAG files as Airflow sees them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchllm_operator.spec import load_spec

ROOT = Path(__file__).parents[2]

# Once as they are, and once as arguments like A=1 change the environment.
PARSE = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from airflow.dag_processing.dagbag import DagBag
heavy = {"vllm", "torch", "pyarrow", "transformers", "tokenizers", "numba", "numpy", "pandas"}

def parse():
    bag = DagBag(sys.argv[1])
    dags = {
        dag.dag_id: {
            "tasks": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
            "spec_path": [task.spec_path for task in dag.tasks if hasattr(task, "spec_path")],
            "pools": {task.task_id: task.pool for task in dag.tasks if task.pool != "default_pool"},
            "outlets": {t.task_id: [a.name for a in t.outlets] for t in dag.tasks if t.outlets},
            "pods": {
                task.task_id.rpartition(".")[2]: {
                    name: given.get(name)
                    for name in ("runner", "gpu", "gpu_count", "namespace", "pod_template_file")
                }
                for task in dag.tasks
                for given in [vars(task)]
                if "pod_template_file" in given
            },
            "num_workers": [t.num_workers for t in dag.tasks if hasattr(t, "spec_path")],
            "first_day": str(dag.start_date.date()),
            "catchup": dag.catchup,
            "max_active_runs": dag.max_active_runs,
            "retries": min(task.retries for task in dag.tasks),
        }
        for dag in bag.dags.values()
    }
    errors = {str(file): error for file, error in bag.import_errors.items()}
    return {"dags": dags, "errors": errors, "heavy": sorted(heavy & set(sys.modules))}

default = parse()
os.environ.update(each.split("=", 1) for each in sys.argv[2:])
print(json.dumps([default, parse()]))
"""
# As docs/operate/kubernetes.md has it: the DAGs needn't be edited for a cluster.
DEPLOYMENT = {
    "BATCHLLM_POOL": "gpus",
    "BATCHLLM_SPEC_DIR": "/no/such/folder",
    "BATCHLLM_FIRST_DAY": "2026-03-01",
    "BATCHLLM_GPU": "nvidia",
    "BATCHLLM_GPU_COUNT": "2",
    "BATCHLLM_NUM_WORKERS": "8",
    "BATCHLLM_NAMESPACE": "batch-gpu",
    "BATCHLLM_POD_TEMPLATE_DIR": "/opt/batchllm/pods",
    "BATCHLLM_PLAN_RUNNER": "kubernetes",
}
WITH_JOBS = ("daily_snippets", "offline_ranking", "snippets_on_arrival")


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The DAGs of this repository: as they are, and as `DEPLOYMENT` has them."""
    env = {name: each for name, each in os.environ.items() if not name.startswith("AIRFLOW")}
    env |= {"AIRFLOW_HOME": str(tmp_path_factory.mktemp("home"))}
    env |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    settings = [f"{name}={value}" for name, value in DEPLOYMENT.items()]
    run = subprocess.run(
        [sys.executable, "-c", PARSE, str(ROOT / "dags"), *settings],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    parsed = json.loads(run.stdout.splitlines()[-1])
    assert [each["errors"] for each in parsed] == [{}, {}]
    assert [each["heavy"] for each in parsed] == [[], []]
    return [each["dags"] for each in parsed]


def group_tasks(group: str) -> dict[str, list[str]]:
    """Each task of a job with those after it."""
    return {
        f"{group}.plan": [f"{group}.commit", f"{group}.generate", f"{group}.report"],
        f"{group}.generate": [f"{group}.commit"],
        f"{group}.commit": [f"{group}.report"],
        f"{group}.report": [],
    }


def test_dag_files_import_without_errors_and_without_heavy_modules(
    parsed: list[dict[str, Any]],
) -> None:
    dags, _ = parsed
    assert sorted(dags) == sorted([*WITH_JOBS, "documents_arrive"])
    specs = ROOT / "dags" / "specs"
    for dag_id, group, catchup, max_active_runs in (
        ("daily_snippets", "snippets", False, 3),
        ("offline_ranking", "ranking", True, 2),
    ):
        dag = dags[dag_id]
        assert dag["tasks"] == group_tasks(group)
        assert dag["spec_path"] == [str(specs / f"{dag_id}.yaml")]
        assert (dag["catchup"], dag["max_active_runs"]) == (catchup, max_active_runs)
        assert dag["retries"] > 0
        assert dag["pools"] == {}  # else a run would hang where nobody made the pool
        assert dag["outlets"] == {f"{group}.commit": [group]}
    arrival = dags["snippets_on_arrival"]
    assert arrival["tasks"] == {
        "arrival.events": ["arrival.partition", "arrival.runs"],
        "arrival.partition": ["snippets.plan"],
        "arrival.runs": [],
        **group_tasks("snippets"),
    }
    assert arrival["spec_path"] == [str(specs / "daily_snippets.yaml")]
    assert dags["documents_arrive"]["outlets"] == {"announce": ["documents"]}


def test_by_default_a_dag_runs_in_the_worker(parsed: list[dict[str, Any]]) -> None:
    none = {"gpu": None, "gpu_count": 1, "namespace": None, "pod_template_file": None}
    for dag_id in WITH_JOBS:
        assert parsed[0][dag_id]["num_workers"] == [None]
        pods = parsed[0][dag_id]["pods"]
        assert pods["plan"] == {"runner": "local", **none}
        assert pods["generate"] == {"runner": "local", **none}


def test_a_deployment_names_pool_specs_first_day_and_pods(parsed: list[dict[str, Any]]) -> None:
    """No DAG reads its spec when it's parsed: there is none in that folder."""
    _, dags = parsed
    assert [dags[dag_id]["pools"] for dag_id in WITH_JOBS] == [
        {"snippets.generate": "gpus"},
        {"ranking.generate": "gpus"},
        {"snippets.generate": "gpus"},
    ]
    assert dags["daily_snippets"]["spec_path"] == ["/no/such/folder/daily_snippets.yaml"]
    assert dags["offline_ranking"]["first_day"] == "2026-03-01"
    for dag_id in WITH_JOBS:
        assert dags[dag_id]["num_workers"] == [8]
        assert {task: dags[dag_id]["pods"][task] for task in ("plan", "generate")} == {
            "plan": {
                "runner": "kubernetes",
                "gpu": None,
                "gpu_count": 1,
                "namespace": "batch-gpu",
                "pod_template_file": "/opt/batchllm/pods/cpu.yaml",
            },
            "generate": {
                "runner": "kubernetes",
                "gpu": "nvidia",
                "gpu_count": 2,
                "namespace": "batch-gpu",
                "pod_template_file": "/opt/batchllm/pods/nvidia.yaml",
            },
        }


@pytest.mark.parametrize("name", ["daily_snippets", "offline_ranking"])
def test_the_dags_specs_are_valid(name: str) -> None:
    spec = load_spec(ROOT / "dags" / "specs" / f"{name}.yaml")
    assert spec.name == name
    assert spec.input.uri == str(ROOT / ".demo" / "lake" / "documents")
    assert spec.model.path == str(ROOT / ".models" / "smollm2")
    assert spec.output.staging_uri == str(ROOT / ".demo" / "staging"), "not between partitions"
    assert spec.sampling.is_greedy
