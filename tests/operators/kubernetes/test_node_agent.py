"""Pods that the node agent runs, for whichever API server."""

from __future__ import annotations

import base64
import threading
import time
from pathlib import Path

import pytest
from kubernetes.client import ApiException
from support.kubernetes.cluster import Backend, Cluster
from support.kubernetes.images import Image
from support.kubernetes.node import NodeSettings
from support.kubernetes.node_agent import NodeAgent

GPU = "nvidia.com/gpu"


def is_alive(pid: int) -> bool:
    """Whether a process is there, and hasn't ended (a zombie has)."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def one_gpu() -> dict[str, object]:
    return {"resources": {"limits": {GPU: "1"}}}


def test_a_pod_runs_to_its_end(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sh", "-c", "echo out; echo err >&2; printf last"])
    pod = cluster.wait_for_phase("job", "Succeeded")
    ended = pod.status.container_statuses[0].state.terminated
    assert (ended.exit_code, ended.reason) == (0, "Completed")
    assert ended.started_at <= ended.finished_at
    assert cluster.log("job") == "out\nerr\nlast"
    assert pod.status.start_time and pod.status.pod_ip and pod.spec.node_name
    truths = {each.type: each.status for each in pod.status.conditions}
    assert truths["PodScheduled"] == truths["Initialized"] == "True"
    assert truths["Ready"] == truths["ContainersReady"] == "False"
    assert cluster.events("job", "Scheduled") == [
        f"Successfully assigned {cluster.namespace}/job to {pod.spec.node_name}"
    ]
    assert cluster.events("job", "Started") == ["Container started: base"]


def test_a_failure_says_why(cluster: Cluster) -> None:
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    cluster.run_pod("logs", ["sh", "-c", "echo reason; exit 3"], container=policy)
    report = "echo note > /dev/termination-log; kill -9 $$$$"  # Kubernetes makes one $ of two
    cluster.run_pod("file", ["sh", "-c", report])
    cluster.run_pod("absent", ["no-such-program"])
    ends = {}
    for name in ("logs", "file", "absent"):
        pod = cluster.wait_for_phase(name, "Failed")
        ended = pod.status.container_statuses[0].state.terminated
        ends[name] = (ended.exit_code, ended.reason, ended.message)
    assert ends["logs"] == (3, "Error", "reason\n")
    assert ends["file"] == (137, "Error", "note\n")
    assert ends["absent"][:2] == (128, "StartError")
    assert 'exec: "no-such-program": executable file not found in $PATH' in ends["absent"][2]


def test_only_the_specs_environment(cluster: Cluster) -> None:
    cluster.create_secret("keys", {"TOKEN": "t0p", "OTHER": "o"})
    settings = {"metadata": {"name": "settings"}, "data": {"MODE": "fast"}}
    cluster.api.create_namespaced_config_map(cluster.namespace, settings)
    cluster.agent.add_image("tool:2", Image({"FROM_IMAGE": "yes", "A": "image"}))
    env = [
        {"name": "A", "value": "spec"},
        {"name": "B", "value": "$(A)-$(UNKNOWN)-$$(A)"},
        {"name": "T", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "TOKEN"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": _optional("nothing")}},
    ]
    sources = [
        {"configMapRef": {"name": "settings"}, "prefix": "S_"},
        {"secretRef": {"name": "absent", "optional": True}},
    ]
    container = {"image": "tool:2", "env": env, "envFrom": sources}
    container["resources"] = {"limits": {"cpu": "1500m"}}
    cluster.run_pod("job", ["/usr/bin/env"], container=container, labels={"app": "x"})
    cluster.wait_for_phase("job", "Succeeded")
    found = dict(line.split("=", 1) for line in cluster.log("job").splitlines())
    assert found.pop("PATH") and found.pop("container") and found.pop("HOSTNAME") == "job"
    assert found == {
        "A": "spec",
        "B": "spec-$(UNKNOWN)-$(A)",
        "T": "t0p",
        "NAME": "job",
        "L": "x",
        "CPU": "2",
        "FROM_IMAGE": "yes",
        "S_MODE": "fast",
    }


def _optional(name: str) -> dict[str, object]:
    return {"name": name, "key": "k", "optional": True}


def test_volumes_are_where_the_spec_says(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_secret("keys", {"token": "t0p"})
    (tmp_path / "lake").mkdir()
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "keys", "secret": {"secretName": "keys"}},
        {"name": "lake", "hostPath": {"path": str(tmp_path / "lake")}},
        {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "keys", "mountPath": "/etc/keys"},
        {"name": "lake", "mountPath": "/lake"},
        {"name": "cache", "mountPath": "/cache", "subPath": "m"},
    ]
    script = (
        "set -e; cat /etc/keys/token > $OUT/x; cp $OUT/x /scratch/y; cp /scratch/y /cache/z; pwd"
    )
    container = {
        "volumeMounts": mounts,
        "env": [{"name": "OUT", "value": "/lake"}, {"name": "U", "value": "s3://a/lake"}],
        "workingDir": "/scratch",
    }
    cluster.run_pod(
        "job", ["sh", "-c", script + '; echo "$U"'], container=container, volumes=volumes
    )
    cluster.wait_for_phase("job", "Succeeded")
    assert (tmp_path / "lake" / "x").read_text() == "t0p"
    folder, uri = cluster.log("job").splitlines()
    assert folder.endswith("/scratch") and uri == "s3://a/lake"
    assert (cluster.agent.folder / "nodes" / "claims" / "models" / "m" / "z").read_text() == "t0p"
    cluster.api.delete_namespaced_pod("job", cluster.namespace)
    cluster.wait_for(lambda: not Path(folder).exists(), "the pod's folders to go")


def test_init_containers_come_first(cluster: Cluster) -> None:
    init = [{"name": "first", "image": "job:1", "command": ["sh", "-c", "echo 1; exit $CODE"]}]
    init[0]["env"] = [{"name": "CODE", "value": "0"}]
    cluster.run_pod("good", ["echo", "main"], initContainers=init)
    init[0]["env"] = [{"name": "CODE", "value": "4"}]
    cluster.run_pod("bad", ["echo", "main"], initContainers=init)
    cluster.wait_for_phase("good", "Succeeded")
    assert cluster.log("good", container="first") == "1\n"
    pod = cluster.wait_for_phase("bad", "Failed")
    assert pod.status.init_container_statuses[0].state.terminated.exit_code == 4
    assert pod.status.container_statuses[0].state.waiting.reason == "PodInitializing"


def test_several_containers_and_their_logs(cluster: Cluster) -> None:
    other = {"name": "other", "image": "job:1", "command": ["sh", "-c", "echo two; exit 2"]}
    base = {"name": "base", "image": "job:1", "command": ["echo", "one"]}
    body = {
        "metadata": {"name": "job"},
        "spec": {"restartPolicy": "Never", "containers": [base, other]},
    }
    cluster.api.create_namespaced_pod(cluster.namespace, body)
    cluster.wait_for_phase("job", "Failed")
    assert cluster.log("job", container="other") == "two\n"
    with pytest.raises(ApiException) as refused:
        cluster.log("job")
    assert refused.value.status == 400
    assert "choose one of: [base other]" in str(refused.value.body)


@pytest.mark.parametrize(
    ("image", "policy", "reason"),
    [
        ("absent:1", "IfNotPresent", "ImagePullBackOff"),
        ("Bad Name", "IfNotPresent", "InvalidImageName"),
        ("absent:1", "Never", "ErrImageNeverPull"),
    ],
)
def test_images_that_cannot_be_had(cluster: Cluster, image: str, policy: str, reason: str) -> None:
    container = {"image": image, "imagePullPolicy": policy}
    cluster.run_pod("job", ["true"], container=container)
    cluster.wait_for(lambda: cluster.waiting_reason("job") == reason, reason)
    assert cluster.phase("job") == "Pending"
    if reason == "ImagePullBackOff":
        failed = cluster.wait_for(lambda: cluster.events("job", "Failed"), "an Event")
        assert any(each.startswith('Failed to pull image "absent:1": rpc') for each in failed)
        with pytest.raises(ApiException) as refused:
            cluster.log("job")
        assert "is waiting to start: trying and failing to pull image" in str(refused.value.body)
    if reason != "InvalidImageName":
        cluster.agent.add_image(image)
        cluster.wait_for_phase("job", "Succeeded")


def test_a_pull_that_takes(cluster: Cluster) -> None:
    cluster.agent.hold_images("job:1")
    cluster.run_pod("job", ["true"])
    cluster.wait_for(lambda: cluster.events("job", "Pulling"), "the pull")
    assert cluster.waiting_reason("job") == "ContainerCreating"
    with pytest.raises(ApiException) as refused:
        cluster.log("job")
    message = 'container \\"base\\" in pod \\"job\\" is waiting to start: ContainerCreating'
    assert refused.value.status == 400 and message in str(refused.value.body)
    cluster.agent.release_images()
    cluster.wait_for_phase("job", "Succeeded")


def test_a_secret_that_comes_later(cluster: Cluster) -> None:
    container = {"envFrom": [{"secretRef": {"name": "late"}}]}
    cluster.run_pod("job", ["sh", "-c", "echo $KEY"], container=container)
    reason = "CreateContainerConfigError"
    cluster.wait_for(lambda: cluster.waiting_reason("job") == reason, reason)
    waiting = cluster.pod("job").status.container_statuses[0].state.waiting
    assert waiting.message == 'secret "late" not found'
    cluster.create_secret("late", {"KEY": "v"})
    cluster.wait_for_phase("job", "Succeeded")
    assert cluster.log("job") == "v\n"


def test_a_volume_that_comes_later(cluster: Cluster) -> None:
    volumes = [{"name": "keys", "secret": {"secretName": "late"}}]
    cluster.run_pod("job", ["true"], volumes=volumes)
    found = cluster.wait_for(lambda: cluster.events("job", "FailedMount"), "the Event")
    assert found == ['MountVolume.SetUp failed for volume "keys" : secret "late" not found']
    cluster.create_secret("late", {"KEY": "v"})
    cluster.wait_for_phase("job", "Succeeded")


def unschedulable(cluster: Cluster, name: str) -> str:
    """The scheduler's message about a pod; empty while it has said nothing."""
    conditions = cluster.pod(name).status.conditions or []
    return next((each.message or "" for each in conditions if each.type == "PodScheduled"), "")


def test_a_gpu_that_appears_later(cluster: Cluster) -> None:
    assert cluster.agent
    cluster.run_pod("job", ["true"], container=one_gpu())
    message = cluster.wait_for(lambda: unschedulable(cluster, "job"), "the condition")
    assert message == (
        f"0/1 nodes are available: 1 Insufficient {GPU}. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )
    assert cluster.events("job", "FailedScheduling") == [message]
    cluster.agent.set_capacity({GPU: "1"})
    cluster.wait_for_phase("job", "Succeeded")


def test_one_gpu_for_two_pods(cluster: Cluster) -> None:
    cluster.agent.set_capacity({GPU: "1"})
    cluster.run_pod("one", ["sleep", "60"], container=one_gpu())
    cluster.wait_for_phase("one", "Running")
    cluster.run_pod("two", ["true"], container=one_gpu())
    cluster.wait_for(lambda: unschedulable(cluster, "two"), "the second to wait")
    cluster.api.delete_namespaced_pod("one", cluster.namespace)
    cluster.wait_for_phase("two", "Succeeded")
    assert cluster.phase("one") == "Gone"


def test_selectors_taints_and_affinity(cluster: Cluster) -> None:
    taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
    name = f"gpu-{cluster.namespace}"
    cluster.agent.add_node(NodeSettings(name, labels={"gpu": "h100"}, taints=[taint]))
    cluster.run_pod("stuck", ["true"], nodeSelector={"gpu": "h100"})
    expression = {"key": "gpu", "operator": "In", "values": ["h100"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    tolerations = [{"key": GPU, "operator": "Exists"}]
    cluster.run_pod("job", ["true"], affinity=affinity, tolerations=tolerations)
    cluster.wait_for_phase("job", "Succeeded")
    assert cluster.pod("job").spec.node_name == name
    message = cluster.wait_for(lambda: unschedulable(cluster, "stuck"), "the condition")
    assert message == (
        "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, "
        f"1 node(s) had untolerated taint {{{GPU}: present}}. preemption: 0/2 nodes are available: "
        "2 Preemption is not helpful for scheduling."
    )


def test_a_log_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    script = f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo two"
    cluster.run_pod("job", ["sh", "-c", script])
    cluster.wait_for_phase("job", "Running")
    answer = cluster.api.read_namespaced_pod_log(
        "job", cluster.namespace, follow=True, timestamps=True, _preload_content=False
    )
    lines = iter(answer)
    stamp, text = next(lines).decode().split(" ", 1)
    assert (
        text == "one\n"
        and stamp.endswith("Z")
        and len(stamp) == len("2026-01-31T00:00:00.000000000Z")
    )
    (tmp_path / "go").touch()
    assert [line.decode().split(" ", 1)[1] for line in lines] == ["two\n"]
    answer.close()
    cluster.wait_for_phase("job", "Succeeded")
    assert cluster.log("job", tail_lines=1) == "two\n"
    assert cluster.log("job", limit_bytes=5) == "one\nt"
    assert cluster.log("job", since_seconds=3600) == "one\ntwo\n"


def test_since_seconds_leaves_out_what_is_older(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sh", "-c", "echo old; sleep 1.2; echo new"])
    cluster.wait_for_phase("job", "Succeeded")
    assert cluster.log("job", since_seconds=1) in ("new\n", "")  # "" on a machine that stalls


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
    agent = NodeAgent(kubernetes_backend.admin_kubeconfig, cluster.namespace, node)
    agent.add_image("job:1")
    daemon = f"setsid sh -c 'exec >/dev/null 2>&1; echo $$$$ > {tmp_path}/pid; sleep 60' & wait"
    cluster.run_pod("job", ["sh", "-c", daemon])
    pid_file = tmp_path / "pid"
    pid = cluster.wait_for(lambda: pid_file.exists() and pid_file.read_text().strip(), "its pid")
    folder = agent.folder
    assert is_alive(int(pid)) and folder.exists()
    agent.close()
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


def test_quotas(cluster: Cluster) -> None:
    cluster.set_quota({f"requests.{GPU}": "1"})
    cluster.agent.set_capacity({GPU: "4"})
    cluster.run_pod("one", ["sleep", "60"], container=one_gpu())
    cluster.wait_for_phase("one", "Running")
    with pytest.raises(ApiException) as refused:
        cluster.run_pod("two", ["true"], container=one_gpu())
    assert refused.value.status == 403 and refused.value.reason == "Forbidden"
    name = f"requests.{GPU}"
    message = (
        'pods \\"two\\" is forbidden: exceeded quota: quota, '
        f"requested: {name}=1, used: {name}=1, limited: {name}=1"
    )
    assert message in str(refused.value.body)
    cluster.api.delete_namespaced_pod("one", cluster.namespace, grace_period_seconds=0)

    def fits() -> bool:
        try:
            cluster.run_pod("two", ["true"], container=one_gpu())
        except ApiException:
            return False
        return True

    cluster.wait_for(fits, "the quota to be free again")
    cluster.wait_for_phase("two", "Succeeded")


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
