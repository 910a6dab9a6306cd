"""What tasks send to Airflow's metrics, and that it never fails one."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from operators.test_operators import execute
from support.task_runs import TaskInstance

from batchllm_operator.operators import (
    BatchLLMCommitOperator,
    BatchLLMGenerateOperator,
    BatchLLMPlanOperator,
    metrics,
)
from batchllm_operator.operators.command import BatchLLMCommandOperator

SPEC = str(Path(__file__).parents[2] / "dags/specs/daily_snippets.yaml")
PLAN_URI = "s3://b/out/_batchllm/snippets/2026-01-31/plan-1"
STAGES: dict[str, Callable[[], Any]] = {
    "plan": lambda: BatchLLMPlanOperator(task_id="plan", spec_path=SPEC, ds="2026-01-31"),
    "generate": lambda: BatchLLMGenerateOperator(task_id="g", plan_uri=PLAN_URI),
    "commit": lambda: BatchLLMCommitOperator(task_id="c", plan_uri=PLAN_URI),
}
SENT: dict[str, dict[str, tuple[str, float]]] = {
    "plan": {
        "rows": ("num_rows", 12),
        "rejected_rows": ("num_rejected_rows", 1),
        "duplicate_rows": ("num_duplicate_rows", 2),
        "reused_rows": ("num_reused_rows", 4),
        "requests": ("num_requests", 9),
        "saving_ratio": ("planned_saving_ratio", 0.5),
    },
    "generate": {
        "rows": ("num_rows", 12),
        "failed_rows": ("num_failed_rows", 3),
        "logical_tokens": ("num_logical_tokens", 1000),
        "prompt_tokens": ("num_prompt_tokens", 900),
        "cached_tokens": ("num_cached_tokens", 400),
        "output_tokens": ("num_output_tokens", 70),
        "engine_time": ("engine_s", 1.5),
    },
    "commit": {
        "rows_in": ("num_rows_in", 12),
        "rows_out": ("num_rows_out", 9),
        "failed_rows": ("num_failed_rows", 3),
        "reused_rows": ("num_reused_rows", 4),
        "saving_ratio": ("achieved_saving_ratio", 0.4),
        "computed_tokens_per_second": ("computed_tokens_per_s", 99.5),
        "output_tokens_per_second": ("output_tokens_per_s", 9.5),
    },
}
"""Of each stage: the metrics' names, and the result's fields with their values."""
TAGS = {"job": "snippets", "dag_id": "nightly"}


@pytest.fixture(autouse=True)
def result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every command answers with; a test may change it."""
    answer: dict[str, Any] = {"plan_uri": PLAN_URI, "report_uri": f"{PLAN_URI}/report.json"}
    answer |= {"num_shards": 2, "ds": "2026-01-31"}
    answer |= dict(value for stage in SENT.values() for value in stage.values())
    monkeypatch.setattr(BatchLLMCommandOperator, "run_command", lambda self, *arguments: answer)
    return answer


def run(stage: str) -> Any:
    return execute(STAGES[stage](), {"ti": TaskInstance(dag_id="nightly")})


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_sends_the_numbers_that_its_result_has(
    stage: str, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, Any] = {}

    def note(name: str, value: Any, *, tags: dict[str, str]) -> None:
        assert (tags, name in sent) == (TAGS, False)
        sent[name] = value.total_seconds() if isinstance(value, timedelta) else value

    monkeypatch.setattr(metrics, "Stats", SimpleNamespace(incr=note, gauge=note, timing=note))
    run(stage)
    assert sent == {f"batchllm.{stage}.{name}": value for name, (_, value) in SENT[stage].items()}
    assert sent.keys() == {metric.name for metric in metrics.STAGE_METRICS[stage]}
    first, second = list(SENT[stage].items())[1:3]
    result[first[1][0]] = None
    del result[second[1][0]]
    before = len(sent)
    sent.clear()
    run(stage)
    assert len(sent) == before - 2


@pytest.mark.parametrize("stage", STAGES)
def test_no_metric_fails_a_task(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError("no route to the metrics' host")

    monkeypatch.setattr(metrics, "Stats", Broken())
    assert run(stage)
    assert f"batchllm.{stage}." in caplog.text
    assert "no route to the metrics' host" in caplog.text


# Through Airflow's own code. The package `statsd` is an extra of Airflow's: here it's a stand-in,
# and what counts is that Airflow lets names, values and tags through.


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

    got: set[str] = set()

    class StatsClient:
        """As much of `statsd.StatsClient` as Airflow uses."""

        def __init__(self, host: str, port: int, prefix: str, ipv6: bool) -> None:
            self._prefix = prefix

        def incr(self, stat: str, count: float, rate: float) -> None:
            got.add(f"{self._prefix}.{stat}:{count:g}|c")

        def timing(self, stat: str, delta: timedelta) -> None:
            got.add(f"{self._prefix}.{stat}:{delta.total_seconds() * 1000:g}|ms")

    monkeypatch.setitem(sys.modules, "statsd", SimpleNamespace(StatsClient=StatsClient))
    settings = {"ON": "True", "HOST": "127.0.0.1", "PORT": "8125", "PREFIX": "airflow"}
    for name, value in (settings | {"INFLUXDB_ENABLED": "True"}).items():
        monkeypatch.setenv(f"AIRFLOW__METRICS__STATSD_{name}", value)
    backend(stats_utils.get_stats_factory())
    run("generate")
    tags = "job=snippets,dag_id=nightly"
    values = {name: f"{value:g}|c" for name, (_, value) in SENT["generate"].items()}
    values["engine_time"] = "1500|ms"
    assert got == {f"airflow.batchllm.generate.{n},{tags}:{value}" for n, value in values.items()}


def test_numbers_arrive_in_open_telemetry(backend: Callable[..., None]) -> None:
    from airflow.sdk._shared.observability.metrics.otel_logger import SafeOtelLogger

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    backend(lambda: SafeOtelLogger(provider, prefix="airflow"))
    for stage in STAGES:
        run(stage)
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
    assert found.keys() == {f"airflow.batchllm.{s}.{name}" for s in SENT for name in SENT[s]}
    assert found["airflow.batchllm.commit.rows_out"].value == 9
    assert found["airflow.batchllm.commit.saving_ratio"].value == 0.4
    assert dict(found["airflow.batchllm.generate.engine_time"].attributes) == TAGS
