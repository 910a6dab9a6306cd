"""daily_snippets by event instead of by clock: whenever a partition of the input has arrived.

Both run one job (the same spec), so a partition that one has published the other leaves as it is.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param

from batchllm_operator.operators import batchllm_task_group, input_asset, one_run_per_partition

SPEC_DIR = Path(os.environ.get("BATCHLLM_SPEC_DIR") or Path(__file__).resolve().parent / "specs")
SPEC = SPEC_DIR / "daily_snippets.yaml"
DOCUMENTS = input_asset("documents", SPEC)  # its events name a partition: {"ds": "2026-01-31"}
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
    "snippets_on_arrival",
    description="Snippets of the partition that has arrived",
    schedule=DOCUMENTS,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=3,
    params={"ds": Param(None, type=["null", "string"], description="by hand: the partition")},
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["batchllm"],
):
    batchllm_task_group(
        SPEC,
        group_id="snippets",
        num_workers=NUM_WORKERS,
        ds=one_run_per_partition(DOCUMENTS),
        pool=os.environ.get("BATCHLLM_POOL") or "default_pool",  # see daily_snippets.py
        gpu=GPU,
        gpu_count=int(os.environ.get("BATCHLLM_GPU_COUNT") or 1),
        generate_args=pod_args(GPU),
        plan_args={"runner": os.environ.get("BATCHLLM_PLAN_RUNNER") or None, **pod_args("cpu")},
        input_asset="documents",
        output_asset="snippets",
    )
