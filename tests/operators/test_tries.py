"""Whose a task's pod is when a try of it ends, by what Airflow says of the task."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowTaskTimeout
from airflow.utils.state import TaskInstanceState
from support.task_runs import TaskInstance
from urllib3.exceptions import ReadTimeoutError

from batchllm_operator.operators import BatchLLMGenerateOperator
from batchllm_operator.operators.pods.end import EndKind, PodEnd
from batchllm_operator.operators.pods.owner import Attempt
from batchllm_operator.operators.pods.triggers import PodWatchTrigger
from batchllm_operator.operators.pods.watch import PodName, WatchLimits
from batchllm_operator.operators.tries import LIVE_STATES, UNKNOWN, task_state

STATES: list[str | None] = [*(str(each) for each in TaskInstanceState), None]
OTHERS: list[str | None] = ["awaiting_input", "deferred", "up_for_reschedule"]
"""A try lives that isn't the one which is at work here."""
OURS: list[str | None] = [state for state in STATES if state not in OTHERS]


class ReleasedError(Exception):
    """The pods were asked to stop."""


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> BatchLLMGenerateOperator:
    """One that says so when it releases its pods."""
    task = BatchLLMGenerateOperator(
        task_id="generate", plan_uri="s3://b/_batchllm/job/ds/plan-1", gpu="nvidia"
    )

    def release(context: Any) -> None:
        raise ReleasedError

    monkeypatch.setattr(task, "_release", release)
    return task


def context(state: str | None = "running", *, is_last: bool = False) -> Any:
    ti = TaskInstance(state=state, max_tries=0 if is_last else 2)
    return {"ti": ti, "run_id": ti.run_id, "dag": None}


def ends_with(task: BatchLLMGenerateOperator, given: Any, error: BaseException) -> None:
    with task._released_when_killed(given):
        raise error


def test_every_state_that_airflow_has_is_known() -> None:
    assert set(OTHERS) | {"running"} == LIVE_STATES
    newer = {"awaiting_input"}  # than Airflow 3.1
    assert set(STATES) >= LIVE_STATES - newer


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("state", OTHERS)
def test_the_pod_of_a_try_that_lives_is_left_to_it(
    task: BatchLLMGenerateOperator, state: str, is_last: bool
) -> None:
    given = context(state, is_last=is_last)
    task.on_kill()
    with pytest.raises(AirflowException, match="killed"):
        ends_with(task, given, AirflowException("killed"))
    with pytest.raises(AirflowTaskTimeout):
        ends_with(task, given, AirflowTaskTimeout())
    with pytest.raises(AirflowException, match="killed"):
        task._defer(given, PodName("p", "n", "base", "u"), 0, -1)


@pytest.mark.parametrize("state", OTHERS)
def test_a_pod_that_took_too_long_is_left_to_a_try_that_lives(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(task, "_pods", lambda *_, **__: pytest.fail("the cluster was asked"))
    end = PodEnd(EndKind.TIMEOUT, "p", "n", pod_uid="u")
    task._remove_pod(context(state), end, is_success=False)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("state", OURS)
def test_the_pod_of_a_try_that_is_killed_goes_unless_the_next_takes_it_up(
    task: BatchLLMGenerateOperator, state: str | None, is_last: bool
) -> None:
    given = context(state, is_last=is_last)
    task.on_kill()
    is_left = state == "running" and not is_last
    with pytest.raises(AirflowException if is_left else ReleasedError):
        ends_with(task, given, AirflowException("killed"))
    with pytest.raises(ReleasedError):
        ends_with(task, given, AirflowTaskTimeout())


def test_a_pod_goes_if_airflow_does_not_say_what_became_of_the_task(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(**_: object) -> Any:
        raise AirflowException("API_SERVER_ERROR")

    given = context()
    monkeypatch.setattr(given["ti"], "get_task_states", silent)
    assert task_state(given["ti"], logging.getLogger("x")) == UNKNOWN
    task.on_kill()
    with pytest.raises(ReleasedError):
        ends_with(task, given, AirflowException("killed"))


def test_a_killed_task_waits_for_neither_airflow_nor_a_new_connection(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's API may be away, and the process has five seconds."""
    given, answers = context(), threading.Event()
    monkeypatch.setattr(given["ti"], "get_task_states", lambda **_: answers.wait(60))
    monkeypatch.setattr(task, "_connect", lambda: pytest.fail("Airflow was asked"))
    monkeypatch.setattr("batchllm_operator.operators.pods.pod_task._STATE_S", 0.05)
    vars(task)["client"] = client = object()
    task.on_kill()
    with pytest.raises(ReleasedError):
        ends_with(task, given, AirflowException("killed"))
    assert not answers.is_set()
    answers.set()
    attempt = Attempt("a", "b", 1, "01")
    assert task._pods(attempt, "n", 1.0, is_cleaning_up=True).calls._api is client


@pytest.mark.parametrize("state", STATES)
def test_a_trigger_deletes_the_pod_only_if_no_try_lives(
    monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    trigger = PodWatchTrigger(
        pod_name="p",
        pod_namespace="n",
        pod_uid="u",
        container_name="base",
        limits=dict.fromkeys(WatchLimits.__dataclass_fields__, 1.0),
        kubernetes_conn_id=None,
        in_cluster=None,
        cluster_context=None,
        config_file=None,
        deadline=None,
        aws_conn_id=None,
        connection_env={},
        removes=True,
    )
    deletions: list[float] = []

    async def delete(patience_s: float, **_: object) -> None:
        deletions.append(patience_s)

    async def said() -> str | None:
        return state

    monkeypatch.setattr(trigger, "_delete", delete)
    monkeypatch.setattr(trigger, "get_task_state", said)
    asyncio.run(trigger.on_kill())
    assert bool(deletions) == (state not in LIVE_STATES)


def test_a_killed_task_first_deletes_the_pod_that_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a short look at it; nobody may answer either, and there may be no time for more."""
    task = BatchLLMGenerateOperator(
        task_id="generate", plan_uri="s3://b/_batchllm/job/ds/plan-1", gpu="nvidia"
    )
    calls: list[Any] = []
    looks: list[float] = []

    def look(name: str, namespace: str, *, _request_timeout: float) -> None:
        looks.append(_request_timeout)
        raise ReadTimeoutError(None, "/", "no answer")

    def delete(name: str, namespace: str, *, body: Any, _request_timeout: float) -> None:
        calls.append((name, namespace, body.preconditions.uid, _request_timeout))
        monkeypatch.setattr(
            task, "_killed_at", (task._killed_at or 0.0) - 60
        )  # no answer for a minute
        raise ReadTimeoutError(None, "/", "no answer")

    api = SimpleNamespace(read_namespaced_pod=look, delete_namespaced_pod=delete)  # nothing else
    monkeypatch.setattr(task, "_connect", lambda: api)
    monkeypatch.setattr(task, "api_timeout", timedelta(hours=1))
    task._pod = PodName("p", "n", "base", "u")
    task.on_kill()
    with pytest.raises(AirflowException, match="killed"):
        ends_with(task, context("failed"), AirflowException("killed"))
    (name, namespace, uid, limit_s), *_ = calls
    assert (name, namespace, uid) == ("p", "n", "u") and looks[0] <= 1 and limit_s <= 3


@pytest.mark.parametrize("kind", [EndKind.API_LOST, EndKind.EXITED])
def test_results_that_are_whole_are_a_success_for_every_try(
    task: BatchLLMGenerateOperator, monkeypatch: pytest.MonkeyPatch, kind: EndKind
) -> None:
    """Also for one that is killed, or that can't see its pod any more."""
    result = {"num_rows": 1}
    monkeypatch.setattr(task, "_verify", lambda context, uid: result)
    monkeypatch.setattr(task, "_release", lambda context: None)
    monkeypatch.setattr(task, "_remove_pod", lambda *_, **__: None)
    task.on_kill()
    assert task._conclude(context(), PodEnd(kind, "p", "n"), 0) == result
