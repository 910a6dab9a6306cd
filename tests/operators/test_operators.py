import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator, TriggerRule
from jsonschema import Draft7Validator

from batchllm_operator import __version__
from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
    batchllm_task_group,
)
from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.provider import get_provider_info


class TaskInstance:
    def __init__(self) -> None:
        self.pushed: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


def execute(task: BaseOperator, context: dict[str, Any]) -> Any:
    """Call execute itself, without the guard that wants a task runner around it."""
    return type(task).execute.__wrapped__(task, context)  # type: ignore[attr-defined]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that were run; each answers with the counts of a plan of two shards."""
    calls: list[tuple[str, ...]] = []

    def run(self: CommandRunner, *arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return {
            "result_version": 1,
            "command": arguments[0],
            "plan_uri": "s3://b/plan-1",
            "num_shards": 2,
            "texts": ["not for XCom"],
        }

    monkeypatch.setattr(CommandRunner, "run", run)
    return calls


def test_plan_returns_its_shards_and_pushes_uris_and_counts(ran: list[tuple[str, ...]]) -> None:
    task = BatchLLMPlanOperator(task_id="plan", spec_path="job.yaml", ds="2026-01-31")
    ti = TaskInstance()
    assert execute(task, {"ti": ti}) == [
        {"plan_uri": "s3://b/plan-1", "shard_idx": 0},
        {"plan_uri": "s3://b/plan-1", "shard_idx": 1},
    ]
    assert ran == [("plan", "--job", "job.yaml", "--ds", "2026-01-31")]
    assert ti.pushed == {
        "plan_uri": "s3://b/plan-1",
        "plan": {"plan_uri": "s3://b/plan-1", "num_shards": 2},
    }


def test_generate_and_commit_name_their_plan(ran: list[tuple[str, ...]]) -> None:
    counts = {"plan_uri": "s3://b/plan-1", "num_shards": 2}
    generate = BatchLLMGenerateOperator(task_id="g", plan_uri="s3://b/plan-1", shard_idx=1)
    commit = BatchLLMCommitOperator(task_id="c", plan_uri="s3://b/plan-1")
    assert execute(generate, {}) == counts
    assert execute(commit, {}) == counts
    assert ran == [
        ("run", "--plan", "s3://b/plan-1", "--shard", "1"),
        ("commit", "--plan", "s3://b/plan-1"),
    ]


def test_templates_are_rendered() -> None:
    context: Any = {"ds": "2026-01-31", "root": "s3://b"}
    plan = BatchLLMPlanOperator(task_id="p", spec_path="{{ root }}/j.yaml", env={"D": "{{ ds }}"})
    plan.render_template_fields(context)
    assert (plan.spec_path, plan.ds, plan.env) == (
        "s3://b/j.yaml",
        "2026-01-31",
        {"D": "2026-01-31"},
    )
    generate = BatchLLMGenerateOperator(task_id="g", plan_uri="{{ root }}/p", shard_idx="{{ ds }}")
    generate.render_template_fields(context)
    assert (generate.plan_uri, generate.shard_idx) == ("s3://b/p", "2026-01-31")
    commit = BatchLLMCommitOperator(task_id="c", plan_uri="{{ root }}/p")
    commit.render_template_fields(context)
    assert commit.plan_uri == "s3://b/p"


def test_task_group_wires_plan_generate_commit() -> None:
    with DAG("job", schedule=None) as dag:
        batchllm_task_group(
            Path("job.yaml"),
            group_id="job",
            env={"A": "1"},
            aws_conn_id="lake",
            max_parallel_shards=4,
            generate_args={"pool": "gpus"},
        )
    plan, generate, commit = (dag.get_task(f"job.{n}") for n in ("plan", "generate", "commit"))
    assert plan.downstream_task_ids == {"job.generate", "job.commit"}
    assert generate.downstream_task_ids == {"job.commit"}
    assert generate.is_mapped
    assert (generate.pool, generate.max_active_tis_per_dagrun) == ("gpus", 4)
    assert commit.trigger_rule == TriggerRule.NONE_FAILED
    assert plan.env == {"A": "1"}
    conn_ids = (plan.aws_conn_id, generate.partial_kwargs["aws_conn_id"], commit.aws_conn_id)
    assert conn_ids == ("lake",) * 3
    assert plan.spec_path == "job.yaml"


def test_provider_info_fits_airflows_schema() -> None:
    info = get_provider_info()
    schema = json.loads(files("airflow").joinpath("provider_info.schema.json").read_text())
    Draft7Validator(schema).validate(info)
    assert info["package-name"] == "batchllm-operator"
    assert info["versions"] == [__version__]


def test_importing_the_operators_loads_nothing_heavy() -> None:
    code = (
        "import sys, batchllm_operator.operators;"
        "print({'torch', 'transformers', 'tokenizers', 'pyarrow', 'vllm', 'numba'}"
        " & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
