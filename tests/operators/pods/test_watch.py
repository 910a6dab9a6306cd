"""Watching a pod while something is wrong with the way to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException
from support.pauses import Clock

from batchllm_operator.operators.pods import watch as watch_module
from batchllm_operator.operators.pods.end import EndKind
from batchllm_operator.operators.pods.state import PodState, Stage
from batchllm_operator.operators.pods.triggers import Cluster
from batchllm_operator.operators.pods.watch import PodName, PodWatch, WatchLimits


def watch_with(
    hook: Any,
    lines: list[str],
    api_s: float = 0.2,
    uid: str = "",
    silence_s: float | None = None,
) -> PodWatch:
    limits = WatchLimits(
        queue_s=9, start_s=9, stuck_s=9, api_s=api_s, poll_s=0.05, silence_s=silence_s
    )
    return PodWatch(hook, PodName("p", "n", "base", uid), limits, lines.append)


def raises(error: Exception) -> Any:
    def make() -> Any:
        raise error

    return make


def test_a_kubeconfig_that_is_being_rewritten_does_not_end_the_watch(tmp_path: Path) -> None:
    """In the triggerer, what `run` raises would end the deferral."""
    path = tmp_path / "config"
    path.write_text("users: [{name: x")  # half of it
    lines: list[str] = []
    watch = watch_with(Cluster(None, False, None, str(path)).hook, lines)
    assert asyncio.run(watch.until_end()).kind is EndKind.API_LOST
    assert len(lines) == 1 and "Can't see pod p at the moment" in lines[0]


def test_an_airflow_that_does_not_give_the_connection_does_not_end_the_watch() -> None:
    watch = watch_with(raises(AirflowException("API_SERVER_ERROR")), [])
    assert asyncio.run(watch.until_end()).kind is EndKind.API_LOST


def test_only_the_api_can_say_that_a_pod_is_gone() -> None:
    """An ingress before an API server that restarts answers 404, too."""
    watch = watch_with(raises(OSError()), [], api_s=9)
    error = ApiException(status=404, reason="Not Found")
    error.body = "<html><h1>404 page not found</h1></html>"  # type: ignore[assignment]
    assert watch._without_answer(error) is None
    error.body = '{"kind": "Status", "reason": "NotFound", "message": "pods not found"}'  # type: ignore[assignment]
    end = watch._without_answer(error)
    assert end is not None and end.kind is EndKind.GONE


def test_it_looks_less_often_while_the_api_is_silent() -> None:
    watch = watch_with(raises(OSError()), [], api_s=900)
    assert watch._pause_s() == 0.05
    pauses = []
    for _ in range(20):
        watch._without_answer(OSError("refused"))
        pauses.append(watch._pause_s())
    assert max(pauses) > 5 and max(pauses) <= 60
    assert len(set(pauses)) == len(pauses)  # many watches don't come at the same moment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


def test_it_pauses_when_the_pod_is_silent_and_seldom_when_it_is_not(clock: Clock) -> None:
    watch = watch_with(_Hook, [], silence_s=300)
    due = []
    for minute in range(1, 31):
        clock.now = minute * 60.0
        if minute < 25:
            watch._hear("still here")
        due.append(watch._is_pause_due())
    assert due == [False] * 28 + [True] * 2  # silent since minute 24
    talkative = watch_with(_Hook, [], silence_s=300)
    clock.now += 1800
    talkative._hear("still here")
    assert talkative._is_pause_due()
    assert not watch_with(_Hook, [])._is_pause_due()


def test_it_does_not_pause_while_a_limit_runs_that_would_begin_anew(clock: Clock) -> None:
    """A pod that can't be seen, or doesn't stop, would otherwise be watched for ever."""
    unseen = watch_with(_Hook, [], api_s=900, silence_s=60)
    unseen._without_answer(OSError("refused"))
    ending = watch_with(_Hook, [], silence_s=60)
    metadata = client.V1ObjectMeta(name="p", deletion_grace_period_seconds=330)
    ending._judge_deletion(PodState(Stage.RUNNING), client.V1Pod(metadata=metadata))
    clock.now = 120.0
    assert not unseen._is_pause_due() and not ending._is_pause_due()


def test_it_can_be_stopped_before_it_begins() -> None:
    watch = watch_with(raises(OSError()), [], api_s=900)
    watch.stop()
    assert asyncio.run(watch.until_end()).kind is EndKind.STOPPED


class _Hook:
    """Connects to nothing."""

    @asynccontextmanager
    async def get_conn(self) -> AsyncIterator[Any]:
        yield None


def test_it_stops_at_once_though_the_api_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow gives a task that it kills five seconds, and the pod is to be deleted in them."""
    asked = threading.Event()

    async def read(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.sleep(3600)

    api = SimpleNamespace(read_namespaced_pod=read)
    monkeypatch.setattr(watch_module.async_client, "CoreV1Api", lambda _: api)
    watch = watch_with(_Hook, [], api_s=900)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: asyncio.run(watch.until_end()))
        assert asked.wait(60)
        watch.stop()
        assert ended.result(60).kind is EndKind.STOPPED


def test_a_pod_that_has_the_name_of_the_watched_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read(*_: object, **__: object) -> Any:
        metadata = client.V1ObjectMeta(name="p", uid="another")
        return client.V1Pod(metadata=metadata, status=client.V1PodStatus(phase="Failed"))

    api = SimpleNamespace(read_namespaced_pod=read)
    monkeypatch.setattr(watch_module.async_client, "CoreV1Api", lambda _: api)
    watch = watch_with(_Hook, [], uid="u")
    assert asyncio.run(watch.until_end()).kind is EndKind.GONE


@pytest.mark.parametrize("is_over", [False, True])
def test_an_evicted_pod_that_is_gone_was_not_deleted_from_outside(
    monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """The condition is seen while the pod ends; then its object is gone."""
    reason, message = "EvictionByEvictionAPI", "Eviction API: evicting"
    target = client.V1PodCondition(
        type="DisruptionTarget", status="True", reason=reason, message=message
    )
    seen = [client.V1PodStatus(phase="Running", conditions=[target])]
    gone = ApiException(status=404, reason="Not Found")
    gone.body = '{"kind": "Status", "reason": "NotFound"}'  # type: ignore[assignment]

    async def read(*_: object, **__: object) -> Any:
        if not seen and not is_over:
            raise gone
        uid = "u" if seen else "another"
        status = seen.pop() if seen else client.V1PodStatus(phase="Pending")
        now = datetime.now(UTC)
        metadata = client.V1ObjectMeta(name="p", uid=uid, creation_timestamp=now)
        return client.V1Pod(metadata=metadata, status=status)

    api = SimpleNamespace(read_namespaced_pod=read)
    monkeypatch.setattr(watch_module.async_client, "CoreV1Api", lambda _: api)
    end = asyncio.run(watch_with(_Hook, [], uid="u").until_end())
    assert (end.kind, end.reason, end.message) == (EndKind.DISRUPTED, reason, message)
