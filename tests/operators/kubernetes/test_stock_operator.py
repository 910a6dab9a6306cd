"""Airflow's own KubernetesPodOperator against the cluster: whatever it asks for is there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import MagicMock

import pytest
from airflow.exceptions import AirflowException
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from support.kubernetes.cluster import Cluster


def context() -> dict[str, Any]:
    """As little as the operator gets by with."""
    instance = MagicMock(task_id="job", dag_id="dag", run_id="run", try_number=1, map_index=-1)
    instance.get_template_context = MagicMock(return_value={})
    dag_run = MagicMock(run_id="run", logical_date=datetime(2026, 1, 31, tzinfo=UTC))
    return {"ti": instance, "task_instance": instance, "dag_run": dag_run, "run_id": "run"}


def operator(cluster: Cluster, command: str, **options: Any) -> KubernetesPodOperator:
    return KubernetesPodOperator(
        task_id="job",
        name="job",
        namespace=cluster.namespace,
        image="job:1",
        cmds=["sh", "-c", command],
        config_file=str(cluster.kubeconfig),
        kubernetes_conn_id=None,
        in_cluster=False,
        startup_check_interval_seconds=1,
        poll_interval=0.1,
        **options,
    )


def test_success(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    operator(cluster, "echo from the pod").execute(context())
    assert "from the pod" in caplog.text
    assert cluster.pods() == []


def test_failure(cluster: Cluster) -> None:
    task = operator(cluster, "echo oh no; exit 3", on_finish_action="keep_pod")
    with pytest.raises(AirflowException, match="failed"):
        task.execute(context())
    (pod,) = cluster.pods()
    assert pod.status.phase == "Failed"
    assert pod.status.container_statuses[0].state.terminated.exit_code == 3
