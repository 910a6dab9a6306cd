"""daily_snippets by event instead of by clock: whenever a partition of the input has arrived.

Both run one job (the same spec), so a partition that one has published the other leaves as it is.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Asset, Param

from batchllm_operator.operators import batchllm_task_group, one_run_per_partition

SPEC_DIR = Path(os.environ.get("BATCHLLM_SPEC_DIR") or Path(__file__).resolve().parent / "specs")
DOCUMENTS = Asset("documents")  # its events say which partition: {"ds": "2026-01-31"}

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
        SPEC_DIR / "daily_snippets.yaml",
        group_id="snippets",
        ds=one_run_per_partition(DOCUMENTS),
        pool=os.environ.get("BATCHLLM_POOL") or "default_pool",  # see daily_snippets.py
        gpu=os.environ.get("BATCHLLM_GPU") or None,  # so, too
        generate_args={"namespace": os.environ.get("BATCHLLM_NAMESPACE")},
        output_asset=Asset("snippets"),
    )
