"""Every day: for each (document, query) of the day's partition, the snippet that answers it."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable  # airflow.sdk: from 3.2 on

from batchllm_operator.operators import batchllm_task_group

SPEC_DIR = Path(os.environ.get("BATCHLLM_SPEC_DIR") or Path(__file__).resolve().parent / "specs")
# nvidia or amd: shards are generated in pods with such GPUs. Unset: in the worker, on what it has.
GPU = os.environ.get("BATCHLLM_GPU") or None
# Workers of one run, each of which takes shards until none is left. Unset: one for each shard, if
# the spec says how many there are, else one.
NUM_WORKERS = int(os.environ.get("BATCHLLM_NUM_WORKERS") or 0) or None


def pod_args(template: str | None) -> dict[str, Any]:
    """Namespace of a task's pods, and their template: a file of the Helm chart's ConfigMap."""
    folder = os.environ.get("BATCHLLM_POD_TEMPLATE_DIR")
    return {
        "namespace": os.environ.get("BATCHLLM_NAMESPACE") or None,
        "pod_template_file": f"{folder}/{template}.yaml" if folder and template else None,
    }


with DAG(
    "daily_snippets",
    description="Snippets of documents for queries; the rows of a document share its prefix",
    # By data interval, so that {{ ds }} is the day that has just ended.
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    # Days before the DAG was unpaused are left to `airflow backfill create`.
    catchup=False,
    # Dates at a time, each with a job folder and a commit of its own; a backfill has its own limit.
    max_active_runs=3,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["batchllm"],
):
    batchllm_task_group(
        SPEC_DIR / "daily_snippets.yaml",
        group_id="snippets",
        num_workers=NUM_WORKERS,
        # A slot for each GPU keeps dates that run in parallel from sharing one. Tasks of a pool
        # that doesn't exist wait for ever, so the default is the pool that every Airflow has.
        pool=os.environ.get("BATCHLLM_POOL") or "default_pool",
        gpu=GPU,
        gpu_count=int(os.environ.get("BATCHLLM_GPU_COUNT") or 1),  # as many as the template has
        generate_args=pod_args(GPU),
        # kubernetes: in a pod, too. Unset: in the worker.
        plan_args={"runner": os.environ.get("BATCHLLM_PLAN_RUNNER") or None, **pod_args("cpu")},
        # Names; their URIs are those of the spec's tables.
        input_asset="documents",
        output_asset="snippets",
    )
