"""Metrics that tasks send to Airflow's metrics backend: StatsD, OpenTelemetry or none."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

# Airflow 3.2 and 3.3 have it in different places.
from airflow.providers.common.compat.sdk import Stats

from batchllm_operator.operators.jobs.owner import job_of

JOB_TAG: Final = "job"
DAG_TAG: Final = "dag_id"

_log = logging.getLogger(__name__)


class TaskMetric(NamedTuple):
    """A metric from a number of a command's result."""

    name: str
    kind: Literal["counter", "gauge", "timer"]  # adds up over tasks; the last task's; a duration
    result_key: str  # a timer's value is in seconds there, and sent in milliseconds


def _counters(stage: str, *names: str) -> list[TaskMetric]:
    return [TaskMetric(f"batchllm.{stage}.{name}", "counter", f"num_{name}") for name in names]


STAGE_METRICS: Final[Mapping[str, list[TaskMetric]]] = {
    "plan": [
        *_counters("plan", "rows", "rejected_rows", "duplicate_rows", "reused_rows", "requests"),
        TaskMetric("batchllm.plan.saving_ratio", "gauge", "planned_saving_ratio"),
    ],
    "generate": [
        *_counters("generate", "rows", "failed_rows", "logical_tokens", "prompt_tokens"),
        *_counters("generate", "cached_tokens", "output_tokens"),
        TaskMetric("batchllm.generate.engine_time", "timer", "engine_s"),
    ],
    "commit": [
        *_counters("commit", "rows_in", "rows_out", "failed_rows", "reused_rows"),
        TaskMetric("batchllm.commit.saving_ratio", "gauge", "achieved_saving_ratio"),
        TaskMetric("batchllm.commit.computed_tokens_per_second", "gauge", "computed_tokens_per_s"),
        TaskMetric("batchllm.commit.output_tokens_per_second", "gauge", "output_tokens_per_s"),
    ],
}
"""Metrics that a task sends when it succeeds, by stage."""


def send_stage(stage: str, context: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Send the metrics of a successful stage; never raises. `result` is the command's.

    Tags are the job and the DAG, but not the partition: each date would be a new series.
    """
    tags = {JOB_TAG: job_of(str(result.get("plan_uri", "")))}
    if dag_id := getattr(context.get("ti"), "dag_id", None):
        tags[DAG_TAG] = str(dag_id)
    for name, kind, key in STAGE_METRICS[stage]:
        if not isinstance(value := result.get(key), int | float):
            continue
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
