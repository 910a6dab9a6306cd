"""What tasks send to Airflow's metrics, and that it never fails one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk import BaseOperator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from support.task_runs import TaskInstance

from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
    metrics,
)
from batchllm_operator.operators.command import CommandRunner

SPEC = str(Path(__file__).parents[2] / "dags/specs/daily_snippets.yaml")
PLAN_URI = "s3://b/out/_batchllm/snippets/2026-01-31/plan-1"
RESULT = {
    "plan_uri": PLAN_URI,
    "report_uri": f"{PLAN_URI}/report.json",
    "num_shards": 2,
    "ds": "2026-01-31",
    "num_rows": 12,
    "num_rejected_rows": 1,
    "num_duplicate_rows": 2,
    "num_requests": 9,
    "planned_saving_ratio": 0.5,
    "num_failed_rows": 3,
    "num_logical_tokens": 1000,
    "num_prompt_tokens": 900,
    "num_cached_tokens": 400,
    "num_output_tokens": 70,
    "engine_s": 1.5,
    "num_rows_in": 12,
    "num_rows_out": 9,
    "num_reused_rows": 4,
    "achieved_saving_ratio": 0.4,
    "computed_tokens_per_s": 99.5,
    "output_tokens_per_s": 9.5,
}
STAGES = {
    "plan": lambda: BatchLLMPlanOperator(task_id="plan", spec_path=SPEC, ds="2026-01-31"),
    "generate": lambda: BatchLLMGenerateOperator(task_id="g", plan_uri=PLAN_URI),
    "commit": lambda: BatchLLMCommitOperator(task_id="c", plan_uri=PLAN_URI),
}
SENT: dict[str, dict[str, Any]] = {
    "plan": {
        "rows": 12,
        "rejected_rows": 1,
        "duplicate_rows": 2,
        "reused_rows": 4,
        "requests": 9,
        "saving_ratio": 0.5,
    },
    "generate": {
        "rows": 12,
        "failed_rows": 3,
        "logical_tokens": 1000,
        "prompt_tokens": 900,
        "cached_tokens": 400,
        "output_tokens": 70,
        "engine_time": timedelta(seconds=1.5),
    },
    "commit": {
        "rows_in": 12,
        "rows_out": 9,
        "failed_rows": 3,
        "reused_rows": 4,
        "saving_ratio": 0.4,
        "computed_tokens_per_second": 99.5,
        "output_tokens_per_second": 9.5,
    },
}


class FakeStats:
    """Airflow's facade, taking notes."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}
        self.tags: list[dict[str, str]] = []

    def _note(self, stat: str, value: Any, *, tags: dict[str, str]) -> None:
        assert stat not in self.sent
        self.sent[stat] = value
        self.tags.append(tags)

    incr = gauge = timing = _note


@pytest.fixture(autouse=True)
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every command answers with; a test may change it."""
    answer = dict(RESULT)
    monkeypatch.setattr(CommandRunner, "run", lambda self, *arguments: answer)
    return answer


def execute(make_task: Callable[[], BaseOperator]) -> Any:
    task = make_task()
    return type(task).execute.__wrapped__(task, {"ti": TaskInstance(dag_id="nightly")})  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sends_its_numbers(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = FakeStats()
    monkeypatch.setattr(metrics, "Stats", stats)
    execute(STAGES[stage])
    assert stats.sent == {f"batchllm.{stage}.{what}": value for what, value in SENT[stage].items()}
    assert all(tags == {"job": "snippets", "dag_id": "nightly"} for tags in stats.tags)


def test_every_name_is_sent_by_a_stage() -> None:
    named = {each.name for stage in metrics.STAGE_METRICS.values() for each in stage}
    assert named == {f"batchllm.{stage}.{what}" for stage in SENT for what in SENT[stage]}


def test_what_a_result_lacks_is_not_sent(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = FakeStats()
    monkeypatch.setattr(metrics, "Stats", stats)
    del result["num_cached_tokens"]
    result["engine_s"] = None
    execute(STAGES["generate"])
    assert SENT["generate"].keys() - {name.split(".")[-1] for name in stats.sent} == {
        "cached_tokens",
        "engine_time",
    }


@pytest.mark.parametrize("stage", STAGES)
def test_no_metric_fails_a_task(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError("no route to the metrics' host")

    monkeypatch.setattr(metrics, "Stats", Broken())
    assert execute(STAGES[stage])
    assert f"batchllm.{stage}." in caplog.text
    assert "no route to the metrics' host" in caplog.text


# Through Airflow's own code. The package `statsd` is an extra of Airflow's: here it's a stand-in,
# and what counts is that Airflow lets names, values and tags through.


class StatsClient:
    """As much of `statsd.StatsClient` as Airflow uses: one datagram for each number."""

    def __init__(self, host: str, port: int, prefix: str, ipv6: bool) -> None:
        self._prefix = prefix
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect((host, port))

    def incr(self, stat: str, count: float, rate: float) -> None:
        self._send(stat, count, "c")

    def gauge(self, stat: str, value: float, rate: float, delta: bool) -> None:
        self._send(stat, value, "g")

    def timing(self, stat: str, delta: timedelta) -> None:
        self._send(stat, delta.total_seconds() * 1000, "ms")

    def close(self) -> None:
        self._socket.close()

    def _send(self, stat: str, value: float, kind: str) -> None:
        self._socket.send(f"{self._prefix}.{stat}:{value:g}|{kind}".encode())


@pytest.fixture
def backend() -> Iterator[Callable[..., None]]:
    """Sets what Airflow sends with, as its task runner does; undone afterwards."""
    stats = pytest.importorskip(
        "airflow.sdk._shared.observability.metrics.stats", reason="Airflow 3.3 has it there"
    )
    if not hasattr(stats, "initialize"):
        pytest.skip("Airflow 3.3 is the first with a backend that can be set")
    before = stats._factory, stats._backend, stats._export_legacy_names

    def use(factory: Callable[[], Any]) -> None:
        stats.initialize(factory=factory, export_legacy_names=True)

    yield use
    stats._factory, stats._backend, stats._export_legacy_names = before


def test_numbers_arrive_at_a_statsd_server(
    backend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.observability.metrics import stats_utils

    clients: list[StatsClient] = []

    class NotedClient(StatsClient):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            clients.append(self)

    package = ModuleType("statsd")
    package.StatsClient = NotedClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "statsd", package)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        for name, value in {
            "ON": "True",
            "HOST": "127.0.0.1",
            "PORT": str(server.getsockname()[1]),
            "PREFIX": "airflow",
            "INFLUXDB_ENABLED": "True",
        }.items():
            monkeypatch.setenv(f"AIRFLOW__METRICS__STATSD_{name}", value)
        backend(stats_utils.get_stats_factory())
        execute(STAGES["generate"])
        got = {server.recv(1024).decode() for _ in SENT["generate"]}
    for client in clients:
        client.close()
    tags = "job=snippets,dag_id=nightly"
    assert got == {
        f"airflow.batchllm.generate.rows,{tags}:12|c",
        f"airflow.batchllm.generate.failed_rows,{tags}:3|c",
        f"airflow.batchllm.generate.logical_tokens,{tags}:1000|c",
        f"airflow.batchllm.generate.prompt_tokens,{tags}:900|c",
        f"airflow.batchllm.generate.cached_tokens,{tags}:400|c",
        f"airflow.batchllm.generate.output_tokens,{tags}:70|c",
        f"airflow.batchllm.generate.engine_time,{tags}:1500|ms",
    }


def test_numbers_arrive_in_open_telemetry(backend: Callable[..., None]) -> None:
    from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    backend(lambda: SafeOtelLogger(provider, prefix="airflow"))
    for make_task in STAGES.values():
        execute(make_task)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    found = {
        metric.name: point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    names = {each.name for stage in metrics.STAGE_METRICS.values() for each in stage}
    assert found.keys() == {f"airflow.{name}" for name in names}
    assert found["airflow.batchllm.commit.rows_out"].value == 9
    assert found["airflow.batchllm.commit.saving_ratio"].value == 0.4
    attributes = dict(found["airflow.batchllm.generate.engine_time"].attributes)
    assert attributes == {"job": "snippets", "dag_id": "nightly"}
