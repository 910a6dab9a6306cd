"""What is asked of an API server, the double or a real one, through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client as kube
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
    assert pod.metadata.generation == 1
    assert (pod.status.phase, pod.status.qos_class) == ("Pending", "Guaranteed")
    spec = pod.spec
    assert spec.termination_grace_period_seconds == 30
    assert (spec.dns_policy, spec.scheduler_name) == ("ClusterFirst", "default-scheduler")
    assert spec.service_account_name == "default" and spec.enable_service_links
    assert spec.containers[0].image_pull_policy == "IfNotPresent"
    assert spec.containers[0].termination_message_path == "/dev/termination-log"
    assert spec.containers[0].resources.requests == {"cpu": "1", "memory": "1Gi"}
    token = spec.containers[0].volume_mounts[0]
    assert token.mount_path == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert token.name.startswith("kube-api-access-")
    body = {"metadata": {"generateName": "job-"}, "spec": spec}
    names = {
        cluster.api.create_namespaced_pod(cluster.namespace, body).metadata.name for _ in range(2)
    }
    assert len(names) == 2 and all(name.startswith("job-") for name in names)


GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("name", "changes", "field", "message"),
    [
        ("Bad_Name", {}, "metadata.name", "a lowercase RFC 1123 subdomain"),
        ("job", {"labels": {"a": "b c"}}, "metadata.labels", "a valid label must be"),
        ("job", {"labels": {"a": "b" * 64}}, "metadata.labels", "must be no more than 63"),
        ("job", {"restartPolicy": "No"}, "spec.restartPolicy", 'Unsupported value: "No"'),
        ("job", {"container": {"image": ""}}, "spec.containers[0].image", "Required value"),
        ("job", {"containers": []}, "spec.containers", "Required value"),
        (
            "job",
            {"containers": [{"name": "a", "image": "i"}, {"name": "a", "image": "i"}]},
            "spec.containers[1].name",
            'Duplicate value: "a"',
        ),
        (
            "job",
            {"container": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}},
            "spec.containers[0].resources.requests",
            "must be less than or equal to cpu limit of 1",
        ),
        (
            "job",
            {"container": {"resources": {"requests": {GPU: "1"}, "limits": {GPU: "2"}}}},
            "spec.containers[0].resources.requests",
            f"must be equal to {GPU} limit of 2",
        ),
        (
            "job",
            {"container": {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}},
            "spec.containers[0].volumeMounts[0].name",
            'Not found: "v"',
        ),
        (
            "job",
            {"activeDeadlineSeconds": 0},
            "spec.activeDeadlineSeconds",
            "must be between 1 and 2147483647, inclusive",
        ),
    ],
)
def test_invalid_pods(
    cluster: Cluster, name: str, changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ApiException) as error:
        make(cluster, name, **changes)
    body = refusal(error, 422, "Invalid")
    causes = {each["field"]: each["message"] for each in body["details"]["causes"]}
    assert message in causes[field]
    assert body["message"].startswith(f'Pod "{name}" is invalid: ')


def test_label_selectors(cluster: Cluster) -> None:
    for name, labels in {"a": {"x": "1"}, "b": {"x": "2", "y": ""}, "c": {}}.items():
        make(cluster, name, labels=labels)
    expected = {
        "": "abc",
        "x=1": "a",
        "x==2": "b",
        "x!=1": "bc",
        "x in (1, 2)": "ab",
        "x notin (1)": "bc",
        "y": "b",
        "!x": "c",
        "x,!y": "a",
        "x in (1,2),x!=2": "a",
    }
    for selector, names in expected.items():
        assert "".join(each.metadata.name for each in cluster.pods(selector)) == names, selector
    with pytest.raises(ApiException) as error:
        cluster.pods("x=(")
    refusal(error, 400, "BadRequest")


def test_field_selectors_and_pages(cluster: Cluster) -> None:
    for name in "abc":
        make(cluster, name)

    def names(**options: Any) -> list[str]:
        listed = cluster.api.list_namespaced_pod(cluster.namespace, **options)
        return [each.metadata.name for each in listed.items]

    assert names(field_selector="metadata.name=b") == ["b"]
    assert names(field_selector="status.phase!=Pending") == []
    assert names(field_selector="spec.nodeName=,metadata.name!=c") == ["a", "b"]
    with pytest.raises(ApiException) as error:
        names(field_selector="spec.containers=1")
    refusal(error, 400, "BadRequest")
    first = cluster.api.list_namespaced_pod(cluster.namespace, limit=2)
    assert first.metadata.remaining_item_count == 1
    assert names(limit=2, _continue=first.metadata._continue) == ["c"]


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
    mine = seen(2, **only, field_selector="metadata.name=job,status.phase!=Running")
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
    operations = [{"op": "replace", "path": "/metadata/labels/b", "value": "4"}]
    assert cluster.api.patch_namespaced_pod(*where, operations).metadata.labels["b"] == "4"
    with pytest.raises(ApiException) as error:
        cluster.api.patch_namespaced_pod(*where, [{"op": "remove", "path": "/metadata/no"}])
    assert error.value.status == 422
    # Strategic: containers are merged by their names.
    image = {"spec": {"containers": [{"name": "base", "image": "job:2"}]}}
    pod = cluster.api.patch_namespaced_pod(*where, image)
    assert pod.spec.containers[0].image == "job:2" and pod.spec.containers[0].command == ["true"]
    assert pod.metadata.generation == 2
    with pytest.raises(ApiException) as error:
        cluster.api.patch_namespaced_pod(*where, {"spec": {"nodeName": "here"}})
    body = refusal(error, 422, "Invalid")
    assert "pod updates may not change fields other than" in body["message"]
    condition = {"type": "Mine", "status": "True"}
    patch = {"status": {"conditions": [condition]}, "metadata": {"labels": {"s": "1"}}}
    status = cluster.api.patch_namespaced_pod_status(*where, patch).status
    assert "Mine" in {each.type for each in status.conditions}
    ignored = cluster.api.patch_namespaced_pod(*where, {"status": {"phase": "Failed"}})
    assert ignored.status.phase == "Pending"


def test_updates_of_old_versions_conflict(cluster: Cluster) -> None:
    cluster.create_secret("keys", {"a": "1"})
    old = cluster.api.read_namespaced_secret("keys", cluster.namespace)
    old.string_data = {"b": "2"}
    new = cluster.api.replace_namespaced_secret("keys", cluster.namespace, old)
    assert new.data == {"a": "MQ==", "b": "Mg=="} and new.type == "Opaque"
    with pytest.raises(ApiException) as error:
        cluster.api.replace_namespaced_secret("keys", cluster.namespace, old)
    assert "the object has been modified" in refusal(error, 409, "Conflict")["message"]
    deleted = cluster.api.delete_namespaced_secret("keys", cluster.namespace)
    assert (deleted.status, deleted.details.name) == ("Success", "keys")


def test_a_pod_without_a_node_goes_at_once(cluster: Cluster) -> None:
    pod = make(cluster, "job")
    wrong = kube.V1DeleteOptions(preconditions=kube.V1Preconditions(uid="other"))
    with pytest.raises(ApiException) as error:
        cluster.api.delete_namespaced_pod("job", cluster.namespace, body=wrong)
    assert (
        "the UID in the precondition (other) does not" in refusal(error, 409, "Conflict")["message"]
    )
    right = kube.V1DeleteOptions(preconditions=kube.V1Preconditions(uid=pod.metadata.uid))
    cluster.api.delete_namespaced_pod("job", cluster.namespace, body=right)
    assert cluster.phase("job") == "Gone"
    for name in "ab":
        make(cluster, name, labels={"app": name})
    cluster.api.delete_collection_namespaced_pod(cluster.namespace, label_selector="app=a")
    assert [each.metadata.name for each in cluster.pods()] == ["b"]


def test_a_finalizer_keeps_a_pod(cluster: Cluster) -> None:
    make(cluster, "job")
    where = ("job", cluster.namespace)
    finalizer = {"metadata": {"finalizers": ["batchllm.io/test"]}}
    cluster.api.patch_namespaced_pod(*where, finalizer)
    pod = cluster.api.delete_namespaced_pod(*where)
    assert pod.metadata.deletion_timestamp and cluster.phase("job") == "Pending"
    cluster.api.patch_namespaced_pod(*where, {"metadata": {"finalizers": None}})
    assert cluster.phase("job") == "Gone"


def test_binding_twice_conflicts(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sleep", "60"])
    pod = cluster.wait_for_phase("job", "Running")
    assert pod is not None
    body = kube.V1Binding(
        metadata=kube.V1ObjectMeta(name="job"), target=kube.V1ObjectReference(kind="Node", name="n")
    )
    with pytest.raises(ApiException) as error:
        cluster.api.create_namespaced_pod_binding(
            "job", cluster.namespace, body, _preload_content=False
        )
    message = f'pod job is already assigned to node "{pod.spec.node_name}"'
    assert message in refusal(error, 409, "Conflict")["message"]


def test_what_the_server_says_of_itself(cluster: Cluster) -> None:
    assert kube.VersionApi(cluster.client).get_code().git_version.startswith("v1.")
    names = {each.name for each in kube.CoreV1Api(cluster.client).get_api_resources().resources}
    assert {"pods", "secrets", "events"} <= names
    assert may_create_pods(cluster)


def test_rights_that_are_asked_for(cluster: Cluster) -> None:
    cluster.double.deny("create", "pods")
    assert not may_create_pods(cluster)


def may_create_pods(cluster: Cluster) -> bool:
    """What the API server says of it."""
    attributes = kube.V1ResourceAttributes(verb="create", resource="pods", namespace="x")
    spec = kube.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
    review = kube.AuthorizationV1Api(cluster.client).create_self_subject_access_review(
        kube.V1SelfSubjectAccessReview(spec=spec)
    )
    return bool(review.status.allowed)
