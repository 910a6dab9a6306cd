"""Each loop that tries again does so a limited number of times, or for a limited time, and after
pauses that differ between those who wait; tests/operators/kubernetes/FAULTS.md lists them."""

import asyncio
import json
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import incluster_config
from support.pauses import MANY, Clock, check_pauses
from support.watched_jobs import watched_job

from batchllm_operator.operators.jobs import calls
from batchllm_operator.operators.jobs.calls import ClusterCalls

KUBECONFIG: dict[str, Any] = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://elsewhere:6443"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}


class Away:
    """An API whose every request fails, or hangs."""

    def __init__(self, fail: Any) -> None:
        self.ask = self.create = fail


def calls_of(api_s: float, **where: Any) -> ClusterCalls:
    return ClusterCalls(watched_job(api_s=api_s, **where), SimpleNamespace(warning=print))


def job(monkeypatch: pytest.MonkeyPatch, patience_s: float = 120.0) -> ClusterCalls:
    made = calls_of(patience_s)

    async def connect() -> None:
        return None

    monkeypatch.setattr(made, "_connect", connect)
    return made


def test_calls_of_the_clusters_api(monkeypatch: pytest.MonkeyPatch) -> None:
    series = []
    for _ in range(MANY):
        clock, pauses = Clock(), list[float]()
        monkeypatch.setattr(calls, "time", clock)

        async def pause(seconds: float, pauses: list[float] = pauses, clock: Clock = clock) -> None:
            pauses.append(seconds)
            clock.sleep(seconds)

        async def refuse() -> None:
            raise ApiException(status=503, reason="away")

        monkeypatch.setattr(calls.asyncio, "sleep", pause)
        with pytest.raises(ApiException):
            asyncio.run(job(monkeypatch).call(lambda _: Away(refuse), "ask"))
        assert clock.now == pytest.approx(120)
        series.append(pauses)
    check_pauses(series, calls.LONGEST_PAUSE_S)


def test_an_api_that_hangs_is_asked_no_longer_than_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last calls of a task that Airflow kills have four seconds together."""

    async def hang() -> None:
        await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        asyncio.run(job(monkeypatch, patience_s=0.05).call(lambda _: Away(hang), "ask"))


OVER_QUOTA = '{"kind": "Status", "message": "pods \\"p\\" is forbidden: exceeded quota: q"}'
CONFLICT = '{"kind": "Status", "reason": "Conflict"}'


@pytest.mark.parametrize(
    ("method", "status", "body", "num_asked"),
    [
        *(("create", status, "", 1) for status in (400, 403, 404, 422)),
        *(("create", status, "", 2) for status in (401, 429, 500)),
        ("create", 403, OVER_QUOTA, 2),
        ("create", 409, CONFLICT, 2),  # two change one quota
        ("ask", 409, CONFLICT, 1),  # a change of an outdated version
    ],
)
def test_what_may_be_answered_later_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, method: str, status: int, body: str, num_asked: int
) -> None:
    asked: list[int] = []

    async def refuse_once() -> None:
        asked.append(status)
        if len(asked) == 1:
            error: Any = ApiException(status=status, reason="not now")
            error.body = body
            raise error

    is_refused = pytest.raises(ApiException) if num_asked == 1 else nullcontext()
    with is_refused:
        asyncio.run(job(monkeypatch).call(lambda _: Away(refuse_once), method))
    assert len(asked) == num_asked


def test_a_kubeconfig_that_is_being_rewritten_is_no_answer(tmp_path: Path) -> None:
    """In the triggerer, any other error would end the deferral."""
    path = tmp_path / "config"
    path.write_text("users: [{name: x")  # half of it
    with pytest.raises(ConnectionError):
        asyncio.run(calls_of(3.0, config_file=str(path)).call(Away, "ask"))


def test_a_trigger_that_is_cancelled_while_it_connects_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, opened, may_go_on = tmp_path / "config", list[Any](), threading.Event()
    path.write_text(yaml.safe_dump(KUBECONFIG), encoding="utf-8")

    def open_slowly(*args: Any, **kwargs: Any) -> Any:
        opened.append(open(*args, **kwargs))  # noqa: PTH123, SIM115 - the test is who closes it
        assert may_go_on.wait(30)
        return opened[0]

    monkeypatch.setattr("aiofiles.threadpool.sync_open", open_slowly)

    async def watch() -> None:
        async with calls_of(30.0, config_file=str(path)) as made:
            await made.call(Away, "ask")

    async def cancelled() -> None:
        watching = asyncio.create_task(watch())
        while not opened and not watching.done():
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await watching

    asyncio.run(cancelled())
    assert opened[0].closed


def test_an_airflow_inside_the_cluster_needs_no_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with the provider's synchronous hook; its asynchronous one wants a kubeconfig then."""
    token = tmp_path / "token"
    token.write_text("a-token")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", certifi.where())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")

    async def reached(conn_id: str | None) -> tuple[str | None, bool]:
        async with calls_of(5.0, kubernetes_conn_id=conn_id, in_cluster=None) as made:
            configuration = (await made._connect()).configuration
            return configuration.host, configuration.verify_ssl

    for conn_id in ("kubernetes_default", None):
        assert asyncio.run(reached(conn_id)) == ("https://10.0.0.1:443", True)
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(KUBECONFIG), encoding="utf-8")
    extra = {"kube_config_path": str(elsewhere), "disable_verify_ssl": True}
    connection = {"conn_type": "kubernetes", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(connection))
    assert asyncio.run(reached("kubernetes_default")) == ("https://elsewhere:6443", False)


@pytest.mark.parametrize(
    ("extra", "given"),
    [
        ({"kube_config_path": "/elsewhere"}, "kube_config_path, config_file"),
        ({"extra__kubernetes__in_cluster": True}, "in_cluster, config_file"),
    ],
)
def test_a_cluster_that_is_named_twice_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: dict[str, Any], given: str
) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(KUBECONFIG), encoding="utf-8")
    connection = {"conn_type": "kubernetes", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps(connection))
    where = {"kubernetes_conn_id": "kubernetes_default", "in_cluster": None}
    made = calls_of(900.0, **where, config_file=str(path))
    with pytest.raises(AirflowFailException, match=f"more than one way: {given}; leave one"):
        asyncio.run(made.call(Away, "ask"))
