"""Every day: a score of how well each document answers its query, whose rows share its prefix."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable  # airflow.sdk: from 3.2 on

from batchllm_operator.operators import batchllm_task_group

SPEC_DIR = Path(os.environ.get("BATCHLLM_SPEC_DIR") or Path(__file__).resolve().parent / "specs")
FIRST_DAY = os.environ.get("BATCHLLM_FIRST_DAY") or "2026-01-01"
GPU = os.environ.get("BATCHLLM_GPU") or None  # see daily_snippets.py
NUM_WORKERS = int(os.environ.get("BATCHLLM_NUM_WORKERS") or 0) or None


def pod_args(template: str | None) -> dict[str, Any]:
    """Of tasks in pods; see daily_snippets.py."""
    folder = os.environ.get("BATCHLLM_POD_TEMPLATE_DIR")
    return {
        "namespace": os.environ.get("BATCHLLM_NAMESPACE") or None,
        "pod_template_file": f"{folder}/{template}.yaml" if folder and template else None,
    }


with DAG(
    "offline_ranking",
    description="Relevance of documents to queries; instruction and query are the prefix",
    # By data interval, so that {{ ds }} is the day that has just ended.
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime.fromisoformat(FIRST_DAY).replace(tzinfo=UTC),
    # Every day from the first one on is ranked, also those that passed while the DAG was paused.
    catchup=True,
    max_active_runs=2,  # days at a time while it catches up
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["batchllm"],
):
    batchllm_task_group(
        SPEC_DIR / "offline_ranking.yaml",
        group_id="ranking",
        num_workers=NUM_WORKERS,
        pool=os.environ.get("BATCHLLM_POOL") or "default_pool",  # see daily_snippets.py
        gpu=GPU,
        gpu_count=int(os.environ.get("BATCHLLM_GPU_COUNT") or 1),
        generate_args=pod_args(GPU),
        plan_args={"runner": os.environ.get("BATCHLLM_PLAN_RUNNER") or None, **pod_args("cpu")},
        input_asset="documents",
        output_asset="ranking",
    )
