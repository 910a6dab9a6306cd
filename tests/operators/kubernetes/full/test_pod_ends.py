"""How pods are ended, and that nothing of them is left."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from pathlib import Path

import pytest
from kubernetes.client import ApiException
from support.kubernetes.cluster import Backend, Cluster
from support.kubernetes.node import NodeSettings
from support.kubernetes.node_agent import NodeAgent


def is_alive(pid: int) -> bool:
    """Whether a process is there, and hasn't ended (a zombie has)."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_deletion_asks_first(cluster: Cluster) -> None:
    cluster.run_pod(
        "job", ["sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done"]
    )
    cluster.wait_for(lambda: cluster.phase("job") == "Running" and cluster.log("job"), "its start")
    follower = cluster.api.read_namespaced_pod_log(
        "job", cluster.namespace, follow=True, _preload_content=False
    )
    deleted = cluster.api.delete_namespaced_pod("job", cluster.namespace)
    assert deleted.metadata.deletion_grace_period_seconds == 30
    assert deleted.metadata.deletion_timestamp is not None
    assert b"".join(follower) == b"up\nbye\n"
    follower.close()
    cluster.wait_for_phase("job", "Gone")
    assert cluster.events("job", "Killing") == ["Stopping container base"]


def test_deletion_then_kills(cluster: Cluster) -> None:
    script = "trap '' TERM; (trap '' TERM; sleep 60) & echo up; while :; do sleep 0.05; done"
    cluster.run_pod("job", ["sh", "-c", script])
    cluster.wait_for(lambda: cluster.phase("job") == "Running" and cluster.log("job"), "its start")
    processes = cluster.agent.processes("job")
    assert len(processes) >= 2
    cluster.api.delete_namespaced_pod("job", cluster.namespace, grace_period_seconds=1)
    assert cluster.phase("job") == "Running"
    cluster.wait_for_phase("job", "Gone")
    assert not [pid for pid in processes if is_alive(pid)]


def test_a_shorter_grace_replaces_the_longer(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"])
    cluster.wait_for(lambda: cluster.phase("job") == "Running" and cluster.log("job"), "its start")
    cluster.api.delete_namespaced_pod("job", cluster.namespace)
    cluster.api.delete_namespaced_pod("job", cluster.namespace, grace_period_seconds=0)
    assert cluster.phase("job") == "Gone"
    cluster.wait_for(lambda: not _runs(cluster, "job"), "the processes to end")


def _runs(cluster: Cluster, name: str) -> bool:
    try:
        return bool(cluster.agent.processes(name))
    except LookupError:
        return False


def test_a_deadline(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sleep", "60"], activeDeadlineSeconds=1)
    pod = cluster.wait_for_phase("job", "Failed")
    assert pod.status.reason == "DeadlineExceeded"
    assert pod.status.message == "Pod was active on the node longer than the specified deadline"
    assert pod.status.container_statuses[0].state.terminated.exit_code == 143


def test_nothing_survives_the_agent(
    kubernetes_backend: Backend, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.agent.close()
    threads = set(threading.enumerate())
    node = NodeSettings(f"other-{cluster.namespace}")
    admin = kubernetes_backend.admin_kubeconfig
    with contextlib.closing(NodeAgent(admin, cluster.namespace, node)) as agent:
        agent.add_image("job:1")
        daemon = f"setsid sh -c 'exec >/dev/null 2>&1; echo $$$$ > {tmp_path}/pid; sleep 60' & wait"
        cluster.run_pod("job", ["sh", "-c", daemon])
        pid_file = tmp_path / "pid"
        pid = cluster.wait_for(
            lambda: pid_file.exists() and pid_file.read_text().strip(), "its pid"
        )
        folder = agent.folder
        assert is_alive(int(pid)) and folder.exists()
    assert not is_alive(int(pid)) and not folder.exists()
    left = set(threading.enumerate()) - threads
    assert not [each for each in left if not each.name.startswith("waitpid")]
    with pytest.raises(ApiException):
        cluster.api.read_node(node.name)


def test_processes_that_leave_end_with_the_container(cluster: Cluster, tmp_path: Path) -> None:
    daemon = f"setsid sh -c 'echo $$$$ > {tmp_path}/pid; sleep 60' & "
    wait = f"while [ ! -s {tmp_path}/pid ]; do sleep 0.02; done"
    cluster.run_pod("job", ["sh", "-c", daemon + wait])
    cluster.wait_for_phase("job", "Succeeded")
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_dependents_go_with_their_owner(cluster: Cluster) -> None:
    owner = cluster.run_pod("job", ["sleep", "60"])
    reference = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "job",
        "uid": owner.metadata.uid,
    }
    body = {
        "metadata": {"name": "mine", "ownerReferences": [reference]},
        "data": {"k": base64.b64encode(b"v").decode()},
    }
    cluster.api.create_namespaced_secret(cluster.namespace, body)
    cluster.create_secret("free", {"k": "v"})
    time.sleep(0.1)  # long enough for a controller that is too eager
    assert cluster.api.read_namespaced_secret("mine", cluster.namespace)
    cluster.api.delete_namespaced_pod("job", cluster.namespace)

    def secrets() -> set[str]:
        return {
            s.metadata.name for s in cluster.api.list_namespaced_secret(cluster.namespace).items
        }

    cluster.wait_for(lambda: "mine" not in secrets(), "the Secret to go")
    assert "free" in secrets()
