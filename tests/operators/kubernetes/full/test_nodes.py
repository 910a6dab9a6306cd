"""How nodes treat pods, and what goes wrong with them: the node agent, for any control plane."""

import os
from typing import Any

import pytest
from kubernetes import client as kube
from support.kubernetes.cluster import Cluster
from support.kubernetes.pod_worker import Image
from urllib3.exceptions import HTTPError

GPU = "nvidia.com/gpu"
ONE_GPU = {"resources": {"limits": {GPU: "1"}}}
IGNORES_SIGTERM = "trap '' TERM; echo up; while :; do sleep 0.05; done"


def conditions(cluster: Cluster, name: str) -> dict[str, tuple[str, str, str]]:
    """A pod's conditions by type: status, reason and message."""
    found = cluster.pod(name).status.conditions or []
    return {each.type: (each.status, each.reason or "", each.message or "") for each in found}


def log(cluster: Cluster, name: str, **options: Any) -> str:
    options["_preload_content"] = False  # else the client gives the text of a bytes object
    answer = cluster.api.read_namespaced_pod_log(name, cluster.namespace, **options)
    return bytes(answer.data).decode()


def start(cluster: Cluster, script: str = "echo up; sleep 60") -> None:
    limited = {"resources": {"limits": {"memory": "64Mi"}}}
    cluster.run_pod("job", ["sh", "-c", script], container=limited)
    cluster.wait_for(lambda: cluster.phase("job") == "Running" and log(cluster, "job"), "its start")


def ended(cluster: Cluster, name: str, phase: str) -> Any:
    """How a pod's container has ended."""
    pod = cluster.wait_for_phase(name, phase)
    return pod.status.container_statuses[0].state.terminated


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_pod_runs_to_its_end(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sh", "-c", "echo out; echo err >&2; printf last"])
    assert ended(cluster, "job", "Succeeded").exit_code == 0
    assert log(cluster, "job") == "out\nerr\nlast"
    assert log(cluster, "job", tail_lines=1) == "last"
    assert log(cluster, "job", limit_bytes=5) == "out\ne"


def test_a_failure_says_why(cluster: Cluster) -> None:
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    cluster.run_pod("job", ["sh", "-c", "echo reason; exit 3"], container=policy)
    end = ended(cluster, "job", "Failed")
    assert (end.exit_code, end.reason, end.message) == (3, "Error", "reason\n")
    cluster.run_pod("absent", ["no-such-program"])
    end = ended(cluster, "absent", "Failed")
    assert end.exit_code == 128 and '"no-such-program": executable file not found' in end.message


def test_the_environment_of_a_container(cluster: Cluster) -> None:
    cluster.agent.add_image("tool:2", Image({"FROM_IMAGE": "yes", "A": "image"}))
    env = [
        {"name": "A", "value": "spec"},
        {"name": "B", "value": "$(A)-$(UNKNOWN)-$$(A)"},
        {"name": "T", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "TOKEN"}}},
        {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "TMPDIR", "value": "/tmp/x"},
    ]
    container = {
        "image": "tool:2",
        "env": env,
        "envFrom": [{"secretRef": {"name": "keys"}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    volumes = [{"name": "scratch", "emptyDir": {}}]
    command = ["/usr/bin/env"]
    cluster.run_pod("job", command, container=container, labels={"app": "x"}, volumes=volumes)
    waits = "CreateContainerConfigError"
    cluster.wait_for(lambda: cluster.waiting_reason("job") == waits, "it to miss its Secret")
    cluster.create_secret("keys", {"TOKEN": "t0p", "OTHER": "o"})
    cluster.wait_for_phase("job", "Succeeded")
    found = dict(line.split("=", 1) for line in log(cluster, "job").splitlines())
    assert found.pop("TMPDIR").endswith("/scratch/x") and found.pop("HOSTNAME") == "job"
    secret = {"T": "t0p", "TOKEN": "t0p", "OTHER": "o"}
    assert (
        found == {"A": "spec", "B": "spec-$(UNKNOWN)-$(A)", "L": "x", "FROM_IMAGE": "yes"} | secret
    )


@pytest.mark.parametrize(
    ("image", "reason"), [("absent:1", "ImagePullBackOff"), ("Bad Name", "InvalidImageName")]
)
def test_images_that_cannot_be_had(cluster: Cluster, image: str, reason: str) -> None:
    cluster.run_pod("job", ["true"], container={"image": image})
    cluster.wait_for(lambda: cluster.waiting_reason("job") == reason, reason)
    assert cluster.phase("job") == "Pending"
    cluster.agent.add_image(image)
    cluster.wait_for_phase("job", "Succeeded")


@pytest.mark.parametrize("grace_s", [None, 1, 0])
def test_a_deletion_ends_all_processes(cluster: Cluster, grace_s: int | None) -> None:
    start(cluster, "echo up; sleep 60 & wait" if grace_s is None else IGNORES_SIGTERM)
    pid = cluster.agent.pid("job")
    options = {} if grace_s is None else {"grace_period_seconds": grace_s}
    deleted = cluster.api.delete_namespaced_pod("job", cluster.namespace, **options)
    assert deleted.metadata.deletion_grace_period_seconds == (30 if grace_s is None else grace_s)
    cluster.wait_for_phase("job", "Gone")
    cluster.wait_for(lambda: not is_alive(pid), "its processes to end")


def test_a_gpu_that_appears_later(cluster: Cluster) -> None:
    cluster.run_pod("one", ["sleep", "60"], container=ONE_GPU)

    def scheduled() -> tuple[str, str, str]:
        return conditions(cluster, "one").get("PodScheduled", ("", "", ""))

    cluster.wait_for(lambda: scheduled()[1] == "Unschedulable", "the condition")
    assert f"0/1 nodes are available: 1 Insufficient {GPU}." in scheduled()[2]
    cluster.agent.set_capacity({GPU: "1"})
    cluster.wait_for_phase("one", "Running")
    cluster.run_pod("two", ["true"], container=ONE_GPU)
    cluster.wait_for(lambda: conditions(cluster, "two"), "the second to wait")
    assert cluster.phase("two") == "Pending"
    cluster.api.delete_namespaced_pod("one", cluster.namespace)
    cluster.wait_for_phase("two", "Succeeded")


def test_a_node_that_is_selected(cluster: Cluster) -> None:
    cluster.run_pod("stuck", ["true"], nodeSelector={"gpu": "h100"})
    cluster.run_pod("job", ["true"], nodeSelector={"kubernetes.io/os": "linux"})
    cluster.wait_for_phase("job", "Succeeded")
    cluster.wait_for(lambda: conditions(cluster, "stuck"), "the condition")
    message = conditions(cluster, "stuck")["PodScheduled"][2]
    assert "1 node(s) didn't match Pod's node affinity/selector" in message


def test_out_of_memory(cluster: Cluster) -> None:
    start(cluster)
    cluster.agent.oom_kill("job")
    end = ended(cluster, "job", "Failed")
    assert (end.exit_code, end.reason) == (137, "OOMKilled")


def test_a_lost_node(cluster: Cluster) -> None:
    start(cluster)
    pid = cluster.agent.pid("job")
    cluster.agent.lose_node()
    assert cluster.phase("job") == "Running" and not is_alive(pid)
    with pytest.raises((kube.ApiException, HTTPError)):  # a kubelet that hangs answers nothing
        log(cluster, "job", _request_timeout=5)
    cluster.agent.mark_node_unreachable()
    cluster.agent.delete_pods_of_lost_node()
    pod = cluster.pod("job")
    assert pod.metadata.deletion_timestamp is not None and pod.status.phase == "Running"
    assert conditions(cluster, "job")["DisruptionTarget"][1] == "DeletionByTaintManager"
    cluster.agent.collect_lost_pods()
    cluster.wait_for_phase("job", "Gone")
