"""How many workers a plan has, and what generate runs for them."""

from pathlib import Path
from typing import Any

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
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs.end import EndKind, JobEnd


def record_runs(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[tuple[str, ...]]:
    """Commands that are run from now on; each has this result."""
    ran: list[tuple[str, ...]] = []

    def run(self: BatchLLMCommandOperator, *arguments: str) -> Any:
        ran.append(arguments)
        return result

    monkeypatch.setattr(BatchLLMCommandOperator, "run_command", run)
    return ran


@pytest.mark.parametrize(
    ("num_workers", "num_shards", "in_spec", "made"),
    [
        (1, 2, 4096, 1),
        (3, 2, 4096, 2),
        (1024, 2000, 2000, 1024),
        ("3", 9, 9, 3),
        (None, 7, 7, 7),
        (None, 7, None, 1),
        (None, 0, 4, 0),
        (8, 0, 4, 0),
    ],
)
def test_a_plan_has_at_most_a_worker_for_each_shard(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_workers: Any,
    num_shards: int,
    in_spec: int | None,
    made: int,
) -> None:
    """And doesn't depend on their number."""
    result = {"plan_uri": "s3://b/plan-1", "num_shards": num_shards}
    ran = record_runs(monkeypatch, result)
    spec, ti = write_spec(tmp_path, num_shards=in_spec), TaskInstance()
    task = BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds="d", num_workers=num_workers)
    assert execute(task, {"ti": ti}) == result
    assert ti.pushed == {"plan_uri": "s3://b/plan-1", "plan": result, "num_workers": made}
    assert ran == [("plan", "--job", spec, "--ds", "d")]


@pytest.mark.parametrize("num_workers", [0, -1, True, 2.0])
def test_a_number_of_workers_that_is_none_is_refused_when_the_dag_is_parsed(
    num_workers: Any,
) -> None:
    with (
        DAG("job", schedule=None),
        pytest.raises(ValueError, match=rf"num_workers is {num_workers!r}; it must be"),
    ):
        batchllm_task_group("job.yaml", num_workers=num_workers)


@pytest.mark.parametrize(
    ("stage", "rendered"),
    [
        *(("plan", rendered) for rendered in ("many", "None", "0", "-1", 0)),
        *(("generate", rendered) for rendered in ("many", "None", "", None)),
    ],
)
def test_a_template_that_renders_to_no_number_fails_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, rendered: Any
) -> None:
    """Before anything is run: a plan without a worker would be no use."""
    ran = record_runs(monkeypatch, {"plan_uri": "s3://b/plan-1", "num_shards": 2})
    if stage == "plan":
        spec = write_spec(tmp_path, num_shards=2)
        task: Any = BatchLLMPlanOperator(task_id="plan", spec_path=spec, ds="d")
    else:
        task = BatchLLMGenerateOperator(task_id="g", plan_uri="s3://b/plan")
    task.num_workers = rendered
    with pytest.raises(AirflowFailException, match=f"num_workers is {rendered!r}; it must be"):
        execute(task, {"ti": TaskInstance()})
    assert ran == []


@pytest.mark.parametrize(
    ("result", "end", "scaled"),
    [
        ("shard 3 is free", {"parallelism": 1}, [(3,)]),
        ("shard 3 is free", {"parallelism": 3}, []),
        ({"num_finished": 1, "num_shards": 3}, {"num_running": 1, "num_waiting": 2}, [(1,)]),
        ({"num_finished": 1, "num_shards": 3}, {"num_pods": 2}, [(3, 3)]),
        ({"num_finished": 3, "num_shards": 3}, {"num_running": 1, "num_waiting": 2}, []),
    ],
)
def test_a_look_lowers_and_raises_the_jobs_parallelism(
    monkeypatch: pytest.MonkeyPatch, result: Any, end: dict[str, int], scaled: list[Any]
) -> None:
    """Kueue would stop all pods of a Job in a queue, and queue it again."""
    monkeypatch.setattr(BatchLLMCommandOperator, "run_verify", lambda *_: result)
    given: dict[str, Any] = {"plan_uri": "s3://b/p", "num_workers": 3, "gpu": "amd"}
    seen: dict[str, Any] = {"num_pods": 3, "parallelism": 3, **end}
    for queue_name, expected in ((None, scaled), ("gpus", [])):
        task = BatchLLMGenerateOperator(task_id="g", queue_name=queue_name, **given)
        numbers: list[Any] = []
        monkeypatch.setattr(task, "scale", lambda *number: numbers.append(number))  # noqa: B023
        is_whole = task.look({}, JobEnd(EndKind.PAUSED, **seen))
        assert (is_whole, numbers) == (result == {"num_finished": 3, "num_shards": 3}, expected)
