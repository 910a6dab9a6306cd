"""What is asked of an API server, the double or a real one, through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import ApiException
from support.kubernetes.cluster import Cluster

NO_NODE = {"nodeSelector": {"no": "such-node"}}


def make(cluster: Cluster, name: str, **changes: Any) -> Any:
    """A pod that never gets a node."""
    return cluster.run_pod(name, ["true"], **{**NO_NODE, **changes})


def refusal(error: pytest.ExceptionInfo[ApiException], code: int, reason: str) -> dict[str, Any]:
    """The Status of an error, which must have this code and reason."""
    body = dict(json.loads(error.value.body))
    assert (error.value.status, body["code"], body["reason"]) == (code, code, reason)
    assert (body["kind"], body["status"]) == ("Status", "Failure")
    return body


def test_a_new_pod_is_completed(cluster: Cluster) -> None:
    container = {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}
    pod = make(cluster, "job", container=container)
    assert pod.metadata.uid and pod.metadata.creation_timestamp and pod.metadata.resource_version
    assert pod.metadata.namespace == cluster.namespace and pod.status.phase == "Pending"
    assert pod.spec.termination_grace_period_seconds == 30
    assert pod.spec.scheduler_name == "default-scheduler"
    (base,) = pod.spec.containers
    assert base.image_pull_policy == "IfNotPresent"
    assert base.termination_message_path == "/dev/termination-log"
    assert base.termination_message_policy == "File"
    assert base.resources.requests == {"cpu": "1", "memory": "1Gi"}


def test_label_selectors(cluster: Cluster) -> None:
    for name, labels in {"a": {"x": "1"}, "b": {"x": "2", "y": ""}, "c": {}}.items():
        make(cluster, name, labels=labels)
    expected = {
        "": "abc",
        "x=1": "a",
        "x==2": "b",
        "x!=1": "bc",
        "y": "b",
        "!x": "c",
        "x,!y": "a",
    }
    for selector, names in expected.items():
        assert "".join(each.metadata.name for each in cluster.pods(selector)) == names, selector
    with pytest.raises(ApiException) as error:
        cluster.pods("x=(")
    refusal(error, 400, "BadRequest")


def test_field_selectors(cluster: Cluster) -> None:
    for name in "ab":
        make(cluster, name)
    where = cluster.namespace
    listed = cluster.api.list_namespaced_pod(where, field_selector="metadata.name=b")
    assert [each.metadata.name for each in listed.items] == ["b"]
    with pytest.raises(ApiException) as error:
        cluster.api.list_namespaced_pod(where, field_selector="spec.no=x")
    found = refusal(error, 400, "BadRequest")
    assert found["message"] == "field label not supported: spec.no"


def test_a_watch_sees_each_change(cluster: Cluster) -> None:
    make(cluster, "old", labels={"app": "x"})
    listed = cluster.api.list_namespaced_pod(cluster.namespace)
    revision = listed.metadata.resource_version
    make(cluster, "job", labels={"app": "x"})
    labels = {"metadata": {"labels": {"app": "y"}}}
    cluster.api.patch_namespaced_pod("job", cluster.namespace, labels)
    cluster.api.delete_namespaced_pod("old", cluster.namespace)

    def seen(count: int, **options: Any) -> list[tuple[str, str]]:
        """The next changes, `count` of them."""
        found: list[tuple[str, str]] = []
        changes = watch.Watch()
        for each in changes.stream(
            cluster.api.list_namespaced_pod, cluster.namespace, timeout_seconds=30, **options
        ):
            found.append((each["type"], each["object"].metadata.name))
            if len(found) == count:
                changes.stop()
        return found

    only = {"resource_version": revision, "label_selector": "app=x"}
    assert seen(1, **only, field_selector="metadata.name=old")[0][0] in ("MODIFIED", "DELETED")
    mine = seen(2, **only, field_selector="metadata.name=job")
    while mine[-1][0] == "MODIFIED":  # the scheduler may have said something in between
        mine = seen(len(mine) + 1, **only, field_selector="metadata.name=job")
    assert (mine[0], mine[-1]) == (("ADDED", "job"), ("DELETED", "job"))  # by the selector
    assert seen(1) == [("ADDED", "job")]


def test_a_watch_from_too_long_ago(cluster: Cluster) -> None:
    revision = cluster.api.list_namespaced_pod(cluster.namespace).metadata.resource_version
    make(cluster, "job")
    cluster.double.forget_history()
    changes = watch.Watch().stream(
        cluster.api.list_namespaced_pod, cluster.namespace, resource_version=revision
    )
    with pytest.raises(ApiException) as error:
        next(changes)
    assert error.value.status == 410


def test_patches(cluster: Cluster) -> None:
    make(cluster, "job", labels={"a": "1", "b": "2"})
    where = ("job", cluster.namespace)
    merged = cluster.api.patch_namespaced_pod(
        *where, {"metadata": {"labels": {"a": None, "c": "3"}, "annotations": {"n": "v"}}}
    )
    assert merged.metadata.labels == {"b": "2", "c": "3"}
    condition = {"type": "Mine", "status": "True"}
    patch = {"status": {"conditions": [condition]}}
    status = cluster.api.patch_namespaced_pod_status(*where, patch).status
    assert "Mine" in {each.type for each in status.conditions}
    ignored = cluster.api.patch_namespaced_pod(*where, {"status": {"phase": "Failed"}})
    assert ignored.status.phase == "Pending"
