"""An operator's arguments for a test cluster; needs no Airflow."""

from pathlib import Path
from typing import Any

from support.kubernetes.cluster import Cluster

import batchllm_operator

_COMPILED = Path(batchllm_operator.__file__).parent / "__pycache__"


def pod_arguments(cluster: Cluster, lake: Path) -> dict[str, Any]:
    """An operator's arguments for pods of the cluster that see the lake.

    They see what numba has compiled here, too: half a minute of each pod that plans.
    """
    folders = {"lake": lake, "compiled": _COMPILED}
    mounts = [{"name": name, "mountPath": str(path)} for name, path in folders.items()]
    volumes = [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()]
    return {
        "runner": "kubernetes",
        "image": "job:1",
        "namespace": cluster.namespace,
        "config_file": str(cluster.kubeconfig),
        "kubernetes_conn_id": None,
        "poll_interval": 0.1,
        "max_restarts": 0,
        "cpu": "10m",
        "memory": "2Gi" if cluster.backend.has_nodes else "64Mi",
        "termination_grace_period": 40,
        "pod_template_dict": {
            "spec": {
                # The lake is the test's own folder, which only its user may enter.
                "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
                "containers": [
                    {
                        "name": "base",
                        "resources": {"requests": {"ephemeral-storage": "1Mi"}},
                        "env": [{"name": "NUMBA_CACHE_DIR", "value": str(_COMPILED)}],
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            }
        },
    }
