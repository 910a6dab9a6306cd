"""Whose a task's Job is when a try of it ends, by what Airflow says of the task."""

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
)
from airflow.utils.state import TaskInstanceState
from operators.test_operators import execute
from operators.test_retries import KUBECONFIG
from support.task_runs import TaskInstance

from batchllm_operator.operators import BatchLLMGenerateOperator, stage_operator
from batchllm_operator.operators.jobs.cluster_job import ClusterJob
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.watch import LIVE_STATES, JobTrigger

KNOWN = {
    *("awaiting_input", "deferred", "failed", "queued", "removed", "restarting", "running"),
    *("scheduled", "skipped", "success", "up_for_reschedule", "up_for_retry", "upstream_failed"),
}
"""Of Airflow 3.2 and 3.3."""
STATES: list[str | None] = [*(str(state) for state in TaskInstanceState), None]
RESULT = {"plan_uri": "p", "num_rows": 1}


class ReleasedError(Exception):
    """The Job was to be deleted, unless a later try has it."""


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> BatchLLMGenerateOperator:
    """One that says so when it gives up its Job."""
    task = BatchLLMGenerateOperator(
        task_id="generate", plan_uri="s3://b/_batchllm/job/ds/plan-1", gpu="nvidia"
    )

    def release(context: Any, *, is_whole: bool | None = None) -> None:
        raise ReleasedError

    monkeypatch.setattr(task, "_release", release)
    task._job = task._job_in("namespace", context())
    task._job.of = replace(task._job.of, uid="uid")
    return task


def context(state: str | None = "running", *, is_last: bool = False) -> Any:
    ti = TaskInstance(state=state, max_tries=0 if is_last else 2)
    return {"ti": ti, "run_id": ti.run_id, "dag": None}


def ends_with(task: BatchLLMGenerateOperator, of: Any, error: BaseException) -> None:
    with task._released_when_killed(of):
        raise error


def test_every_state_that_airflow_has_is_known() -> None:
    """A new one may be that of a task whose try lives: see `LIVE_STATES`."""
    assert {str(state) for state in TaskInstanceState} <= KNOWN


@pytest.mark.parametrize("state", STATES)
def test_a_killed_try_leaves_its_job_only_if_the_task_runs_and_will_be_tried_again(
    task: BatchLLMGenerateOperator, state: str | None
) -> None:
    """Marking or clearing a task changes its state first."""
    task.on_kill()
    is_left = state == "running"
    with pytest.raises(AirflowException if is_left else ReleasedError):
        ends_with(task, context(state), AirflowException("killed"))
    with pytest.raises(ReleasedError):
        ends_with(task, context(state, is_last=True), AirflowException("killed"))


def test_a_timeout_ends_the_job_and_another_failure_has_dealt_with_it(
    task: BatchLLMGenerateOperator,
) -> None:
    with pytest.raises(ReleasedError):
        ends_with(task, context(), AirflowTaskTimeout())
    with pytest.raises(AirflowException, match="as ever"):
        ends_with(task, context(), AirflowException("as ever"))


@pytest.mark.parametrize("answer", ["hangs", "fails"])
def test_a_killed_try_waits_a_second_for_airflows_answer(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(stage_operator, "_STATE_S", 0.05)
    of = context()

    def states(**_: Any) -> Any:
        if answer == "hangs":
            time.sleep(5)
        raise OSError("away")

    of["ti"].get_task_states = states
    task.on_kill()
    with pytest.raises(ReleasedError):
        ends_with(task, of, AirflowException("killed"))


def test_a_killed_task_does_not_ask_airflow_for_the_connection_again(
    task: BatchLLMGenerateOperator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not answer, and there are only four seconds."""
    name, path = "AIRFLOW_CONN_KUBERNETES_DEFAULT", tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(KUBECONFIG), encoding="utf-8")
    extra = {"kube_config_path": str(path)}
    monkeypatch.setenv(name, json.dumps({"conn_type": "kubernetes", "extra": extra}))

    async def address() -> str:
        assert task._job is not None
        async with task._job as job:
            return str((await job._connect()).configuration.host)

    assert asyncio.run(address()) == "https://elsewhere:6443"
    monkeypatch.delenv(name)
    task.on_kill()
    assert asyncio.run(address()) == "https://elsewhere:6443"


@pytest.mark.parametrize("state", STATES)
def test_a_task_that_was_marked_meanwhile_is_not_deferred(
    task: BatchLLMGenerateOperator, state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defer(**_: Any) -> None:
        raise StopIteration

    monkeypatch.setattr(task, "defer", defer)
    assert task._job is not None
    expected = StopIteration if state in ("running", None) else ReleasedError
    with pytest.raises(expected):
        task._defer(context(state), task._job.of)


@pytest.mark.parametrize("state", [*STATES, "unknown"])
def test_a_cancelled_trigger_deletes_the_job_unless_a_try_lives(
    task: BatchLLMGenerateOperator, state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task._job is not None
    trigger = JobTrigger(**asdict(task._job.of))
    deleted: list[str] = []

    async def delete(job: Any) -> None:
        deleted.append(job.of.name)

    async def state_now() -> str | None:
        if state == "unknown":
            raise ConnectionError
        return state

    monkeypatch.setattr(trigger, "_delete", delete)
    monkeypatch.setattr(trigger, "get_task_state", state_now)
    asyncio.run(trigger.cleanup())
    assert bool(deleted) == (state not in {*LIVE_STATES, "unknown"})


@pytest.mark.parametrize("kind", [EndKind.UNSEEN, EndKind.FAILED, EndKind.LATE])
def test_results_that_are_whole_are_a_success_for_every_try(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch, kind: EndKind
) -> None:
    """Also for one that is killed, or that can't see its Job any more."""
    released: list[Any] = []
    monkeypatch.setattr(task, "verified", lambda context, end: RESULT)
    monkeypatch.setattr(task, "_release", lambda context, is_whole: released.append(context))
    task.on_kill()
    assert task._conclude(context(), JobEnd(kind)) == RESULT
    assert released


@pytest.mark.parametrize("has_job", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [AirflowException, AirflowFailException, OSError])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_try_that_sees_neither_lake_nor_job_leaves_the_job_only_to_a_next_try(
    task: BatchLLMGenerateOperator,
    monkeypatch: pytest.MonkeyPatch,
    is_last: bool,
    error: type[Exception],
    has_job: bool,
) -> None:
    def verified(*_: object) -> str:
        raise error("the lake is away")

    monkeypatch.setattr(task, "verified", verified)
    is_released = is_last or error is AirflowFailException  # then Airflow tries no more
    with pytest.raises(ReleasedError if is_released else error):
        if has_job:
            task._conclude(context(is_last=is_last), JobEnd(EndKind.UNSEEN))
        else:
            execute(task, context(is_last=is_last))


@pytest.mark.parametrize("is_refused", [False, True], ids=["unseen", "refused"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_job_that_is_not_there_for_this_try_is_left_to_the_next_one_if_there_is_one(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch, is_last: bool, is_refused: bool
) -> None:
    """Refused: as after a change of the template, while a dead worker's Job still runs."""

    def take(_: Any) -> None:
        raise AirflowException("the cluster refuses the Job")

    monkeypatch.setattr(task, "verified", lambda context, end: "shard 3 is missing")
    monkeypatch.setattr(task, "_take", take)
    with pytest.raises(ReleasedError if is_last else AirflowException):
        if is_refused:
            execute(task, context(is_last=is_last))
        else:
            task._conclude(context(is_last=is_last), JobEnd(EndKind.UNSEEN))


@pytest.mark.parametrize("num_workers", ["many", "None", ""])
def test_a_try_that_is_refused_before_it_starts_leaves_no_earlier_job(
    task: BatchLLMGenerateOperator, num_workers: str
) -> None:
    task.num_workers = num_workers
    with pytest.raises(ReleasedError) as refused:
        execute(task, context())
    said = f"num_workers is {num_workers!r}; it must be an integer from 1, so its template needs a"
    assert said in str(refused.value.__cause__ or refused.value.__context__)


def test_a_job_goes_also_when_the_lake_cannot_be_looked_at_at_all(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(task, "verified", verified)
    with pytest.raises(ReleasedError):
        task._conclude(context(), JobEnd(EndKind.LATE))


@pytest.mark.parametrize(
    ("action", "of_whole", "of_unfinished"),
    [
        ("delete_pod", False, False),
        ("delete_succeeded_pod", False, True),
        ("keep_pod", True, True),
    ],
)
def test_on_finish_action_says_which_ended_jobs_are_kept(
    monkeypatch: pytest.MonkeyPatch, action: str, of_whole: bool, of_unfinished: bool
) -> None:
    """Also one of an earlier try, for whose results nothing is left to do."""
    arguments = {"plan_uri": "s3://b/p", "gpu": "amd", "on_finish_action": action}
    task, kept = BatchLLMGenerateOperator(task_id="g", **arguments), list[bool]()

    async def delete(_: Any, *, keeps_ended: bool) -> None:
        kept.append(keeps_ended)

    monkeypatch.setattr(ClusterJob, "delete", delete)
    monkeypatch.setattr(task, "verified", lambda context, end: RESULT)
    execute(task, context())
    task._conclude(context(), JobEnd(EndKind.COMPLETE))
    monkeypatch.setattr(task, "verified", lambda context, end: "shard 3 is missing")
    with pytest.raises(AirflowException):
        task._conclude(context(), JobEnd(EndKind.FAILED))
    assert kept == [of_whole, of_whole, of_unfinished]


def test_no_workers_make_no_job_for_shards_that_are_left(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.num_workers = "0"
    monkeypatch.setattr(task, "_release", lambda context: None)
    monkeypatch.setattr(task, "verified", lambda context, end: "0 of 2 shards finished")
    with pytest.raises(AirflowFailException, match="num_workers is 0, but work is left: 0 of 2"):
        execute(task, context())
