"""Each loop that tries again does so a limited number of times, or for a limited time, and after
pauses that differ between those who wait; docs/faults.md lists them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from kubernetes.client.exceptions import ApiException
from support.pauses import MANY, Clock, check_pauses

from batchllm_operator.operators import stage
from batchllm_operator.operators.pods import attempt
from batchllm_operator.operators.pods.attempt import StoppedError


def test_calls_of_the_clusters_api(monkeypatch: pytest.MonkeyPatch) -> None:
    series = []
    for _ in range(MANY):
        clock = Clock()
        monkeypatch.setattr(attempt, "time", clock)
        pods: Any = object.__new__(attempt.AttemptPods)
        pods._patience_s, pods._log = 120.0, SimpleNamespace(warning=lambda *_: None)
        pods._connect = lambda: None
        pauses: list[float] = []

        def pause(seconds: float, pauses: list[float] = pauses, clock: Clock = clock) -> None:
            pauses.append(seconds)
            clock.sleep(seconds)

        pods._pause = pause

        def refuse(**_: object) -> None:
            raise ApiException(status=503, reason="away")

        with pytest.raises(ApiException):
            pods._call(refuse)
        assert 120 <= clock.now <= 120 + attempt._LONGEST_PAUSE_S
        series.append(pauses)
    check_pauses(series, attempt._LONGEST_PAUSE_S)


def test_waiting_for_room_in_a_quota() -> None:
    waits = [timedelta(0), timedelta(minutes=2), timedelta(hours=5)]
    series = [
        [stage._quota_pause(waited, 5.0).total_seconds() for waited in waits] for _ in range(MANY)
    ]
    check_pauses(series, 300)
    assert min(pauses[0] for pauses in series) >= 30


def test_looking_for_results_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage._VERIFY_PAUSES_S == (2.0, 10.0)
    series = []
    for _ in range(MANY):
        pauses: list[float] = []

        def verify(*_: object) -> None:
            raise AirflowException("away")

        task: Any = SimpleNamespace(
            verify_command=lambda _: ["--plan", "x"],
            _commands=lambda verify=verify: SimpleNamespace(verify=verify),
            _is_killed=False,
            log=SimpleNamespace(warning=lambda *_: None),
            _sleep=pauses.append,
        )
        with pytest.raises(AirflowException):
            stage.BatchLLMStageOperator._verify(task, None)
        assert len(pauses) == 2
        series.append(pauses)
    check_pauses(series, 15.0)


def test_waits_end_when_the_task_is_stopped() -> None:
    pods: Any = object.__new__(attempt.AttemptPods)
    pods._is_stopped = lambda: True
    with pytest.raises(StoppedError):
        pods._pause(60.0)
