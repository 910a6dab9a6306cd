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
    instance.start_date = datetime(2026, 1, 31, tzinfo=UTC)
    return {"ti": instance, "task_instance": instance, "run_id": "run", "dag": object()}


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


def test_success(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    operator(cluster, "echo from the pod").execute(context())
    assert "[base] from the pod" in capsys.readouterr().out
    assert cluster.pods() == []


def test_failure(cluster: Cluster) -> None:
    task = operator(cluster, "echo oh no; exit 3", on_finish_action="keep_pod")
    with pytest.raises(AirflowException, match="returned a failure"):
        task.execute(context())
    (pod,) = cluster.pods()
    assert pod.status.phase == "Failed"
    assert pod.status.container_statuses[0].state.terminated.exit_code == 3
