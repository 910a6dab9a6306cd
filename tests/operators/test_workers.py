"""Generate mapped over workers: how many, and what each is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG
from operators.test_operators import execute, write_spec
from support.task_runs import TaskInstance

from batchllm_operator.operators import (
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
    batchllm_task_group,
)
from batchllm_operator.operators.command import CommandRunner


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that were run, for a plan of two shards."""
    calls: list[tuple[str, ...]] = []

    def run(self: CommandRunner, *arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return {"plan_uri": "s3://b/plan-1", "num_shards": 2}

    monkeypatch.setattr(CommandRunner, "run", run)
    return calls


@pytest.mark.parametrize(
    ("num_workers", "made"), [(1, 1), (2, 2), (3, 2), (1024, 2)], ids=lambda count: str(count)
)
def test_plan_returns_its_workers_at_most_one_for_each_shard(
    ran: list[tuple[str, ...]], tmp_path: Path, num_workers: int, made: int
) -> None:
    """However many shards the spec says; and the plan doesn't depend on their number."""
    spec = write_spec(tmp_path, num_shards=4096)
    task = BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds="d", num_workers=num_workers)
    assert execute(task, {"ti": TaskInstance()}) == [
        {"plan_uri": "s3://b/plan-1", "worker": worker, "num_workers": made}
        for worker in range(made)
    ]
    assert ran == [("plan", "--job", spec, "--ds", "d")]


@pytest.mark.parametrize("num_workers", [None, 1, 8])
def test_a_plan_without_shards_is_mapped_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int | None
) -> None:
    result = {"plan_uri": "s3://b/plan-1", "num_shards": 0}
    monkeypatch.setattr(CommandRunner, "run", lambda *_: result)
    spec = write_spec(tmp_path, num_shards=4)
    task = BatchLLMPlanOperator(task_id="plan", spec_path=spec, num_workers=num_workers)
    assert execute(task, {"ti": TaskInstance()}) == []


def test_without_a_number_of_shards_and_of_workers_there_is_one_worker(
    ran: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the plan may have more shards than Airflow maps a task over."""
    monkeypatch.setenv("AIRFLOW__CORE__MAX_MAP_LENGTH", "1")
    task = BatchLLMPlanOperator(task_id="plan", spec_path=write_spec(tmp_path, num_shards=None))
    (only,) = execute(task, {"ti": TaskInstance()})
    assert only == {"plan_uri": "s3://b/plan-1", "worker": 0, "num_workers": 1}


@pytest.mark.parametrize("num_workers", [0, -1, True, "8", 2.0])
def test_a_number_of_workers_that_is_none_is_refused_when_the_dag_is_parsed(
    num_workers: Any,
) -> None:
    with (
        DAG("job", schedule=None),
        pytest.raises(ValueError, match=rf"num_workers is {num_workers!r}; it must be"),
    ):
        batchllm_task_group("job.yaml", num_workers=num_workers)


def test_more_workers_than_airflow_maps_are_refused_before_planning(
    ran: list[tuple[str, ...]], tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, num_shards=2)
    task = BatchLLMPlanOperator(task_id="plan", spec_path=spec, num_workers=1025)
    with pytest.raises(AirflowFailException, match=r"^num_workers is 1025.*1024.*max_map_length"):
        execute(task, {"ti": TaskInstance()})
    assert ran == []


def test_generate_runs_a_worker(ran: list[tuple[str, ...]]) -> None:
    task = BatchLLMGenerateOperator(
        task_id="g", plan_uri="s3://b/plan-1", worker=0, num_workers="3"
    )
    assert execute(task, {"ti": TaskInstance()})["plan_uri"] == "s3://b/plan-1"
    of_worker = ("--plan", "s3://b/plan-1", "--worker", "0", "--num-workers", "3")
    assert ran == [("run", *of_worker, "--owner", mock.ANY)]
