"""What an operator is told of a test cluster; needs no Airflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.kubernetes.cluster import Cluster


def pod_arguments(cluster: Cluster, lake: Path) -> dict[str, Any]:
    """An operator's arguments for pods of the cluster that see the lake."""
    mount = {"name": "lake", "mountPath": str(lake)}
    return {
        "runner": "kubernetes",
        "image": "job:1",
        "namespace": cluster.namespace,
        "config_file": str(cluster.kubeconfig),
        "kubernetes_conn_id": None,
        "poll_interval": 0.05,
        "cpu": "10m",
        "memory": "64Mi",
        "termination_grace_period": 40,
        "pod_template_dict": {
            "spec": {
                "containers": [{"name": "base", "volumeMounts": [mount]}],
                "volumes": [{"name": "lake", "hostPath": {"path": str(lake)}}],
            }
        },
    }
