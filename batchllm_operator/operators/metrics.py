"""What tasks send to the metrics that Airflow is configured with: StatsD, OpenTelemetry, none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

# Airflow 3.1, 3.2 and 3.3 each have it in another place.
from airflow.providers.common.compat.sdk import Stats

Kind = Literal["counter", "gauge", "timer"]

JOB_TAG: Final = "job"
DAG_TAG: Final = "dag_id"
STAGE_TAG: Final = "stage"
"""Only of what is sent about pods; in the other names the stage is a part."""

_log = logging.getLogger(__name__)


class TaskMetric(NamedTuple):
    """A number of a command's result, and how it is sent."""

    name: str
    kind: Kind
    """`counter` adds up over tasks, `gauge` is the last task's, `timer` is a duration."""
    result_key: str
    """In the command's result; a timer's is in seconds there, and sent in milliseconds."""


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
        ("failed_rows", "counter", "num_rows_failed"),
        ("reused_rows", "counter", "num_rows_reused"),
        ("saving_ratio", "gauge", "achieved_saving_ratio"),
        ("tokens_per_second", "gauge", "tokens_per_s"),
    ),
}
"""What a task of each stage sends when it succeeds."""

PODS_REPLACED: Final = "batchllm.pods.replaced"
QUOTA_WAITS: Final = "batchllm.pods.quota_waits"


def send_stage(stage: str, context: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Send the numbers of a stage that has succeeded; never raises.

    Args:
        stage: a key of `STAGE_METRICS`.
        context: Airflow's, of the task.
        result: the command's. A number that it lacks, or has none for, isn't sent.
    """
    tags = _tags(context, str(result.get("plan_uri", "")))
    for metric in STAGE_METRICS[stage]:
        value = result.get(metric.result_key)
        if isinstance(value, int | float):
            _send(metric.name, metric.kind, value, tags)


def count_pod_event(name: str, stage: str, context: Mapping[str, Any], job: str) -> None:
    """Count one `PODS_REPLACED` or `QUOTA_WAITS` of a task; never raises."""
    tags = {STAGE_TAG: stage, JOB_TAG: job, **_dag_tag(context)}
    _send(name, "counter", 1, tags)


def _tags(context: Mapping[str, Any], plan_uri: str) -> dict[str, str]:
    """Job and DAG. Without the partition: each date would be a new series, for ever."""
    parts = ("", "", *plan_uri.rstrip("/").split("/"))  # .../<job>/<ds>/plan-<id>
    return {JOB_TAG: parts[-3] or "job", **_dag_tag(context)}


def _dag_tag(context: Mapping[str, Any]) -> dict[str, str]:
    dag_id = getattr(context.get("ti"), "dag_id", None)
    return {DAG_TAG: str(dag_id)} if dag_id else {}


def _send(name: str, kind: Kind, value: float, tags: dict[str, str]) -> None:
    try:
        if kind == "counter":
            Stats.incr(name, int(value), tags=tags)
        elif kind == "gauge":
            Stats.gauge(name, value, tags=tags)
        else:
            Stats.timing(name, timedelta(seconds=value), tags=tags)
    # Any client's error: the work is done, and its result counts.
    except Exception as error:  # noqa: BLE001
        _log.warning("The metric %s wasn't sent: %s", name, error)
