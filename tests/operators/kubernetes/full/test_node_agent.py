"""Pods that the node agent runs, for whichever API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiException
from support.kubernetes.api_client import RequestFailedError
from support.kubernetes.cluster import Cluster
from support.kubernetes.images import Image


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


def test_what_the_api_fails_to_do_is_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request about the pod is answered with 503 at first: node, status and removal."""
    api = cluster.agent._core.api
    request, failed = api.request, set()

    async def flaky(method: str, path: str, body: Any = None, *rest: str) -> Any:
        sent = (method, path, json.dumps(body, sort_keys=True))
        if "/pods/job" in path and sent not in failed:
            failed.add(sent)
            raise RequestFailedError(503, "away")
        return await request(method, path, body, *rest)

    monkeypatch.setattr(api, "request", flaky)
    cluster.run_pod("job", ["true"])
    cluster.wait_for_phase("job", "Succeeded")
    cluster.run_pod("job-2", ["sleep", "600"])
    cluster.wait_for_phase("job-2", "Running")
    cluster.api.delete_namespaced_pod("job-2", cluster.namespace, grace_period_seconds=1)
    cluster.wait_for_phase("job-2", "Gone")
    assert {method for method, *_ in failed} >= {"POST", "PATCH", "DELETE"}


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
    resources = {"limits": {"cpu": "1500m"}}
    container = {"image": "tool:2", "env": env, "envFrom": sources, "resources": resources}
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
    init: list[dict[str, Any]] = [
        {"name": "first", "image": "job:1", "command": ["sh", "-c", "echo 1; exit $CODE"]}
    ]
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
