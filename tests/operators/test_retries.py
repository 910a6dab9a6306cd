"""Each loop that tries again does so a limited number of times, or for a limited time, and after
pauses that differ between those who wait; docs/faults.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowException
from kubernetes.client.exceptions import ApiException
from support.pauses import MANY, Clock, check_pauses
from urllib3.exceptions import ReadTimeoutError
from urllib3.util.retry import Retry

from batchllm_operator.operators import BatchLLMGenerateOperator
from batchllm_operator.operators.pods import calls, waiting
from batchllm_operator.operators.pods.calls import ClusterCalls, StoppedError


def calls_with(**changes: Any) -> ClusterCalls:
    arguments = {"patience_s": 120.0, "is_stopped": lambda: False, **changes}
    return ClusterCalls(lambda: None, SimpleNamespace(warning=lambda *_: None), **arguments)


@pytest.mark.parametrize("limits", [{}, {"patience_s": 900.0, "limit_s": 120.0}])
def test_calls_of_the_clusters_api(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    series = []
    for _ in range(MANY):
        clock = Clock()
        monkeypatch.setattr(calls, "time", clock)
        asking = calls_with(**limits)
        pauses: list[float] = []

        def pause(seconds: float, pauses: list[float] = pauses, clock: Clock = clock) -> None:
            pauses.append(seconds)
            clock.sleep(seconds)

        monkeypatch.setattr(asking, "pause", pause)

        def refuse(api: object, **_: object) -> None:
            raise ApiException(status=503, reason="away")

        with pytest.raises(ApiException):
            asking.retried(refuse)
        assert clock.now == pytest.approx(120)
        series.append(pauses)
    check_pauses(series, calls._LONGEST_PAUSE_S)


def test_an_api_that_hangs_is_asked_no_longer_than_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last calls of a task that Airflow kills have four seconds together."""
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    asking = calls_with(limit_s=4.0)

    def hang(api: object, *, _request_timeout: float) -> None:
        clock.sleep(_request_timeout)
        raise ReadTimeoutError(None, "/", "no answer")

    for _ in range(2):
        with pytest.raises(ReadTimeoutError):
            asking.retried(hang)
    assert clock.now <= 4.0 + calls._SHORTEST_REQUEST_S  # the second is sent at least


def test_a_client_of_the_operators_makes_each_request_once(tmp_path: Path) -> None:
    """urllib3 would make four, and the limit of a request is for each of them."""
    config = tmp_path / "config"
    server = {"cluster": {"server": "https://127.0.0.1:1"}, "name": "c"}
    context = {"context": {"cluster": "c", "user": "u"}, "name": "c"}
    fields = {"clusters": [server], "contexts": [context], "users": [{"name": "u", "user": {}}]}
    config.write_text(yaml.safe_dump({"current-context": "c", **fields}))
    task = BatchLLMGenerateOperator(
        task_id="generate",
        plan_uri="s3://b/p",
        config_file=str(config),
        kubernetes_conn_id=None,
    )
    pool = task._connect().api_client.rest_client.pool_manager.connection_from_host("127.0.0.1")
    assert Retry.from_int(pool.retries).total == 0


def test_waiting_for_room_in_a_quota() -> None:
    waits = [timedelta(0), timedelta(minutes=2), timedelta(hours=5)]
    series = [
        [waiting._pause(waited, 5.0).total_seconds() for waited in waits] for _ in range(MANY)
    ]
    check_pauses(series, 300)
    assert min(pauses[0] for pauses in series) >= 30


def test_looking_for_results_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting._VERIFY_PAUSES_S == (2.0, 10.0)
    series = []
    for _ in range(MANY):
        pauses: list[float] = []

        def verify(*_: object) -> None:
            raise AirflowException("away")

        task: Any = SimpleNamespace(
            verify_command=lambda *_: ["--plan", "x"],
            _commands=lambda verify=verify: SimpleNamespace(verify=verify),
            _is_killed=False,
            log=SimpleNamespace(warning=lambda *_: None),
            _sleep=pauses.append,
        )
        with pytest.raises(AirflowException):
            waiting.BatchLLMWaitingTask._verify(task, {}, None)
        assert len(pauses) == 2
        series.append(pauses)
    check_pauses(series, 15.0)


def test_waits_end_when_the_task_is_stopped() -> None:
    asking = calls_with(is_stopped=lambda: True)
    with pytest.raises(StoppedError):
        asking.pause(60.0)
    with pytest.raises(StoppedError):
        asking.retried(lambda api, **_: pytest.fail("it has been asked"))


def test_a_signal_ends_a_call_in_its_own_thread() -> None:
    asking = calls_with()
    with pytest.raises(StoppedError):
        asking.retried(lambda api, **_: asking.interrupt())
    asking.interrupt()  # nothing is under way
    assert asking.retried(lambda api, **_: in_a_thread(asking.interrupt)) is None


def in_a_thread(function: Callable[[], None]) -> None:
    """Call it in another thread, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()
