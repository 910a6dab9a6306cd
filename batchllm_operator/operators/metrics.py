"""Metrics that tasks send to Airflow's metrics backend: StatsD, OpenTelemetry or none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

# Airflow 3.1, 3.2 and 3.3 each have it in another place.
from airflow.providers.common.compat.sdk import Stats

from batchllm_operator.operators.jobs.owner import job_of

Kind = Literal["counter", "gauge", "timer"]

JOB_TAG: Final = "job"
DAG_TAG: Final = "dag_id"

_log = logging.getLogger(__name__)


class TaskMetric(NamedTuple):
    """A metric from a number of a command's result."""

    name: str
    kind: Kind
    """`counter` adds up over tasks, `gauge` is the last task's, `timer` is a duration."""
    result_key: str
    """Key in the command's result; a timer's is in seconds there, sent in milliseconds."""


def _metrics(stage: str, *metrics: tuple[str, Kind, str]) -> tuple[TaskMetric, ...]:
    return tuple(TaskMetric(f"batchllm.{stage}.{what}", kind, key) for what, kind, key in metrics)


STAGE_METRICS: Final[Mapping[str, tuple[TaskMetric, ...]]] = {
    "plan": _metrics(
        "plan",
        ("rows", "counter", "num_rows"),
        ("rejected_rows", "counter", "num_rejected_rows"),
        ("duplicate_rows", "counter", "num_duplicate_rows"),
        ("reused_rows", "counter", "num_reused_rows"),
        ("requests", "counter", "num_requests"),
        ("saving_ratio", "gauge", "planned_saving_ratio"),
    ),
    "generate": _metrics(
        "generate",
        ("rows", "counter", "num_rows"),
        ("failed_rows", "counter", "num_failed_rows"),
        ("logical_tokens", "counter", "num_logical_tokens"),
        ("prompt_tokens", "counter", "num_prompt_tokens"),
        ("cached_tokens", "counter", "num_cached_tokens"),
        ("output_tokens", "counter", "num_output_tokens"),
        ("engine_time", "timer", "engine_s"),
    ),
    "commit": _metrics(
        "commit",
        ("rows_in", "counter", "num_rows_in"),
        ("rows_out", "counter", "num_rows_out"),
        ("failed_rows", "counter", "num_failed_rows"),
        ("reused_rows", "counter", "num_reused_rows"),
        ("saving_ratio", "gauge", "achieved_saving_ratio"),
        ("computed_tokens_per_second", "gauge", "computed_tokens_per_s"),
        ("output_tokens_per_second", "gauge", "output_tokens_per_s"),
    ),
}
"""Metrics that a task sends when it succeeds, by stage."""


def send_stage(stage: str, context: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Send the metrics of a successful stage; never raises.

    Args:
        stage: a key of `STAGE_METRICS`.
        context: the task's, from Airflow.
        result: the command's; metrics without a number there aren't sent.
    """
    tags = _tags(context, str(result.get("plan_uri", "")))
    for metric in STAGE_METRICS[stage]:
        value = result.get(metric.result_key)
        if isinstance(value, int | float):
            _send(metric.name, metric.kind, value, tags)


def _tags(context: Mapping[str, Any], plan_uri: str) -> dict[str, str]:
    """Job and DAG, but not the partition: each date would be a new series."""
    dag_id = getattr(context.get("ti"), "dag_id", None)
    return {JOB_TAG: job_of(plan_uri)} | ({DAG_TAG: str(dag_id)} if dag_id else {})


def _send(name: str, kind: Kind, value: float, tags: dict[str, str]) -> None:
    try:
        if kind == "counter":
            Stats.incr(name, int(value), tags=tags)
        elif kind == "gauge":
            Stats.gauge(name, value, tags=tags)
        else:
            Stats.timing(name, timedelta(seconds=value), tags=tags)
    # The client may raise anything; the work is done, so a lost metric must not fail the task.
    except Exception as error:  # noqa: BLE001
        _log.warning("The metric %s wasn't sent: %s", name, error)
