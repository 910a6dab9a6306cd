"""Stands for the pipeline that writes the input table: says that a partition has arrived."""

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, Asset, Param, task

DOCUMENTS = Asset.ref(name="documents")  # of the DAGs that read it, whose spec has its URI

with DAG(
    "documents_arrive",
    description="Emits the event of a partition of the input table",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    params={"ds": Param(type="string", description="the partition, such as 2026-01-31")},
    tags=["batchllm"],
):

    @task(outlets=[DOCUMENTS])
    def announce(*, params: dict[str, Any], outlet_events: Any) -> None:
        outlet_events[DOCUMENTS].extra = {"ds": params["ds"]}

    announce()
