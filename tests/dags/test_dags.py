"""The DAG files as Airflow sees them, and runs of them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.fake_job import DS

from batchllm_operator.spec import load_spec

ROOT = Path(__file__).parents[2]
Airflow = Job = Any  # the fixtures in conftest.py

PARSE = """
import json, sys, warnings
warnings.simplefilter("ignore")
try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:  # Airflow 3.1
    from airflow.models.dagbag import DagBag
bag = DagBag(sys.argv[1])
heavy = {"vllm", "torch", "pyarrow", "transformers", "tokenizers", "numba", "numpy", "pandas"}
dags = {
    dag.dag_id: {
        "tasks": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
        "spec_path": [task.spec_path for task in dag.tasks if hasattr(task, "spec_path")],
        "pools": {task.task_id: task.pool for task in dag.tasks if task.pool != "default_pool"},
        "outlets": {t.task_id: [a.name for a in t.outlets] for t in dag.tasks if t.outlets},
        "gpus": [
            task.partial_kwargs["gpu"]
            for task in dag.tasks
            if "gpu" in getattr(task, "partial_kwargs", {})
        ],
        "pods": {
            task.task_id.rpartition(".")[2]: {
                name: given.get(name)
                for name in ("runner", "gpu", "gpu_count", "namespace", "pod_template_file")
            }
            for task in dag.tasks
            for given in [getattr(task, "partial_kwargs", vars(task))]
            if "pod_template_file" in given
        },
        "first_day": str(dag.start_date.date()),
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


def parse_dags(airflow: Airflow, **env: str) -> dict[str, Any]:
    """The DAGs of this repository, which import nothing heavy and without errors."""
    run = subprocess.run(
        [sys.executable, "-c", PARSE, str(ROOT / "dags")],
        env={**airflow.env, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    parsed = json.loads(run.stdout.splitlines()[-1])
    assert parsed["errors"] == {}
    assert parsed["heavy"] == []
    return dict(parsed["dags"])


def group_tasks(group: str) -> dict[str, list[str]]:
    """Each task of a job with those after it."""
    return {
        f"{group}.plan": [f"{group}.commit", f"{group}.generate", f"{group}.report"],
        f"{group}.generate": [f"{group}.commit"],
        f"{group}.commit": [f"{group}.report"],
        f"{group}.report": [],
    }


def test_dag_files_import_without_errors_and_without_heavy_modules(
    airflow: Airflow,
) -> None:
    dags = parse_dags(airflow)
    assert sorted(dags) == [
        "daily_snippets",
        "documents_arrive",
        "offline_ranking",
        "snippets_on_arrival",
    ]
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
        assert dag["gpus"] == [None]
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


def test_a_deployment_names_pool_specs_gpus_and_first_day(airflow: Airflow) -> None:
    """No DAG reads its spec when it's parsed: there is none in that folder."""
    dags = parse_dags(
        airflow,
        BATCHLLM_POOL="gpus",
        BATCHLLM_SPEC_DIR="/no/such/folder",
        BATCHLLM_FIRST_DAY="2026-03-01",
        BATCHLLM_GPU="amd",
    )
    assert [dags[dag_id]["pools"] for dag_id in sorted(dags)] == [
        {"snippets.generate": "gpus"},
        {},
        {"ranking.generate": "gpus"},
        {"snippets.generate": "gpus"},
    ]
    assert dags["daily_snippets"]["spec_path"] == ["/no/such/folder/daily_snippets.yaml"]
    assert dags["offline_ranking"]["first_day"] == "2026-03-01"
    assert [dags[dag_id]["gpus"] for dag_id in sorted(dags)] == [["amd"], [], ["amd"], ["amd"]]


WITH_JOBS = ("daily_snippets", "offline_ranking", "snippets_on_arrival")


def test_by_default_a_dag_runs_in_the_worker(airflow: Airflow) -> None:
    dags = parse_dags(airflow)
    none = {"gpu": None, "gpu_count": 1, "namespace": None, "pod_template_file": None}
    for dag_id in WITH_JOBS:
        plan, generate = dags[dag_id]["pods"]["plan"], dags[dag_id]["pods"]["generate"]
        assert plan == {"runner": "local", **none}
        assert generate == {"runner": None, **none}


def test_a_deployment_names_namespace_and_templates_of_pods(airflow: Airflow) -> None:
    """As docs/kubernetes.md has it: the DAGs needn't be edited for a cluster."""
    dags = parse_dags(
        airflow,
        BATCHLLM_GPU="nvidia",
        BATCHLLM_GPU_COUNT="2",
        BATCHLLM_NAMESPACE="batch-gpu",
        BATCHLLM_POD_TEMPLATE_DIR="/opt/batchllm/pods",
        BATCHLLM_PLAN_RUNNER="kubernetes",
    )
    for dag_id in WITH_JOBS:
        assert {task: dags[dag_id]["pods"][task] for task in ("plan", "generate")} == {
            "plan": {
                "runner": "kubernetes",
                "gpu": None,
                "gpu_count": 1,
                "namespace": "batch-gpu",
                "pod_template_file": "/opt/batchllm/pods/cpu.yaml",
            },
            "generate": {
                "runner": None,
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
    assert spec.model.path == str(ROOT / ".demo" / "model")
    assert spec.output.staging_uri == str(ROOT / ".demo" / "staging"), "not between partitions"
    assert spec.sampling.is_greedy


@pytest.mark.parametrize(("dag_id", "num_reruns"), [("daily_snippets", 1), ("offline_ranking", 0)])
def test_a_dag_run_publishes_the_partition(
    airflow: Airflow, job: Job, dag_id: str, num_reruns: int
) -> None:
    log = airflow.run(dag_id, job.folder)
    assert log.count("starting task_id=") == 5  # plan, two shards, commit, report
    rows = pq.ParquetFile(job.published(dag_id)).read().to_pylist()
    assert sorted(row["id"] for row in rows) == job.keys()
    assert all(row["error"] is None and row["generated_text"] for row in rows)

    before = job.published(dag_id).read_bytes()
    for _ in range(num_reruns):  # harmless
        airflow.run(dag_id, job.folder)
        assert job.published(dag_id).read_bytes() == before


def test_a_wrong_spec_fails_the_run_at_once_with_its_reason(airflow: Airflow, job: Job) -> None:
    job.write_spec("daily_snippets", prompt={"template": "{no_such_column}"})
    with pytest.raises(RuntimeError) as failure:
        airflow.run("daily_snippets", job.folder)
    log = str(failure.value)
    assert log.count("starting task_id=") == 1  # no retry, no generate
    assert "no_such_column" in log
    assert not (job.folder / "daily_snippets" / f"ds={DS}").exists()


def test_a_branch_that_isnt_taken_skips_the_whole_job(
    airflow: Airflow, job: Job, tmp_path: Path
) -> None:
    """And on the other branch a partition without rows is committed."""
    nothing = {"filter": [{"column": "query", "value": "no such query"}]}
    spec = job.write_spec("taken", on_empty="commit", input=nothing)
    airflow = airflow.with_dag(
        tmp_path / "dags",
        spec_path=str(spec),
        group_id="taken",
        more=f"""
    from airflow.sdk import task

    @task.branch
    def branch():
        return "taken.plan"

    left = batchllm_task_group(spec_path={str(spec)!r}, group_id="left")
    branch() >> [dag.task_group_dict["taken"], left]
""",
    )
    log = airflow.run("job", job.folder)
    assert re.findall(r"Running batchllm (\w+)", log) == ["plan", "commit", "report"]
    assert log.count("starting task_id=") == 4
    assert pq.ParquetFile(job.published("taken")).metadata.num_rows == 0


def test_an_empty_partition_skips_generate_and_commits(airflow: Airflow, job: Job) -> None:
    nothing = {"filter": [{"column": "query", "value": "no such query"}]}
    job.write_spec("daily_snippets", on_empty="commit", input=nothing)
    log = airflow.run("daily_snippets", job.folder)
    assert log.count("starting task_id=") == 3
    assert "Running batchllm run" not in log
    assert pq.ParquetFile(job.published("daily_snippets")).metadata.num_rows == 0
