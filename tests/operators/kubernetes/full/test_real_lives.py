"""Deletions, bindings, watches and logs as a real API server has them (1.36.2)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import ApiException
from support.kubernetes.cluster import Cluster
from support.kubernetes.wire import Wire, pod

MERGE = "application/merge-patch+json"


def bind(api: Wire, name: str, node: str = "nowhere") -> tuple[int, Any]:
    """What the scheduler does; the node needn't be there."""
    body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
    return api.ask("POST", f"pods/{name}/binding", body)


def marks(body: Any) -> tuple[int, int | None]:
    """A pod's generation and grace period."""
    metadata = body["metadata"]
    return metadata["generation"], metadata.get("deletionGracePeriodSeconds")


def grace_left(body: Any, begun: datetime) -> timedelta:
    """From a point in time until the deletion's time."""
    return datetime.fromisoformat(body["metadata"]["deletionTimestamp"]) - begun


def changes(api: Wire, name: str, revision: str) -> list[tuple[Any, ...]]:
    """What has happened to a pod since a revision, up to its deletion."""
    found: list[tuple[Any, ...]] = []
    stream = watch.Watch()
    for each in stream.stream(
        api.cluster.api.list_namespaced_pod,
        api.namespace,
        field_selector=f"metadata.name={name}",
        resource_version=revision,
        timeout_seconds=20,
    ):
        metadata = each["object"].metadata
        found.append((each["type"], metadata.generation, metadata.deletion_grace_period_seconds))
        if each["type"] == "DELETED":
            stream.stop()
    return found


def revision(api: Wire) -> str:
    return str(api.ask("GET", "pods")[1]["metadata"]["resourceVersion"])


def test_a_pod_without_a_node_is_marked_and_goes(api: Wire) -> None:
    begun = revision(api)
    made = api.make("job")
    code, gone = api.ask("DELETE", "pods/job")
    assert (code, gone["kind"], gone["metadata"]["uid"]) == (200, "Pod", made["metadata"]["uid"])
    assert marks(gone) == (2, 0)
    assert changes(api, "job", begun) == [
        ("ADDED", 1, None),
        ("MODIFIED", 2, 0),
        ("DELETED", 2, 0),
    ]


def test_a_grace_period_only_gets_shorter(api: Wire) -> None:
    made = api.make("job", terminationGracePeriodSeconds=50)
    bind(api, "job")
    bound = api.ask("GET", "pods/job")[1]
    assert bound["spec"]["nodeName"] == "nowhere" and marks(bound) == (1, None)
    (condition,) = bound["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    begun = datetime.fromisoformat(made["metadata"]["creationTimestamp"])
    first = api.ask("DELETE", "pods/job", {"gracePeriodSeconds": 20})[1]
    assert marks(first) == (2, 20)
    assert timedelta(seconds=20) <= grace_left(first, begun) < timedelta(seconds=30)
    for query in ("", "?gracePeriodSeconds=40"):
        code, again = api.ask("DELETE", f"pods/job{query}")
        assert (code, again["metadata"]) == (200, first["metadata"])
    shorter = api.ask("DELETE", "pods/job?gracePeriodSeconds=5")[1]
    assert marks(shorter) == (2, 5)
    assert grace_left(first, begun) - grace_left(shorter, begun) == timedelta(seconds=15)
    gone = api.ask("DELETE", "pods/job?gracePeriodSeconds=0")[1]
    assert marks(gone) == (2, 0)
    assert api.ask("DELETE", "pods/job")[0] == 404
    assert changes(api, "job", made["metadata"]["resourceVersion"]) == [
        ("MODIFIED", 1, None),
        ("MODIFIED", 2, 20),
        ("MODIFIED", 2, 5),
        ("MODIFIED", 2, 0),
        ("DELETED", 2, 0),
    ]


def test_a_pod_that_has_ended_goes_at_once(api: Wire) -> None:
    api.make("job")
    bind(api, "job")
    patch = {"status": {"phase": "Failed"}}
    assert api.ask("PATCH", "pods/job/status", patch, MERGE)[0] == 200
    assert marks(api.ask("DELETE", "pods/job")[1]) == (2, 0)
    assert api.ask("GET", "pods/job")[0] == 404


def test_what_is_being_deleted(api: Wire) -> None:
    begun = revision(api)
    api.make("job", metadata={"finalizers": ["batchllm.io/a"]})
    assert marks(api.ask("DELETE", "pods/job")[1]) == (2, 0)
    code, refused = bind(api, "job")
    assert code == 409 and refused["message"] == (
        'Operation cannot be fulfilled on pods/binding "job": pod job is being deleted, cannot be '
        "assigned to a host"
    )
    more = {"metadata": {"finalizers": ["batchllm.io/a", "batchllm.io/b"]}}
    assert api.refused(422, "PATCH", "pods/job", more, MERGE)["message"] == (
        'Pod "job" is invalid: metadata.finalizers: Forbidden: no new finalizers can be added if '
        'the object is being deleted, found new finalizers []string{"batchllm.io/b"}'
    )
    assert api.ask("PATCH", "pods/job", {"metadata": {"finalizers": None}}, MERGE)[0] == 200
    kinds = [each[0] for each in changes(api, "job", begun)]
    assert kinds == ["ADDED", "MODIFIED", "DELETED"]


def test_deletions_that_are_refused(api: Wire) -> None:
    made = api.make("job")["metadata"]
    bind(api, "job")
    name = 'Operation cannot be fulfilled on Pod "job"'
    found = api.refused(409, "DELETE", "pods/job", {"preconditions": {"uid": "x"}})
    assert found == {
        "reason": "Conflict",
        "message": f"{name}: the UID in the precondition (x) does not match the UID in record "
        f"({made['uid']}). The object might have been deleted and then recreated",
        "details": {"name": "job", "kind": "Pod"},
    }
    wanted = {"preconditions": {"resourceVersion": made["resourceVersion"]}}
    found = api.refused(409, "DELETE", "pods/job", wanted)
    assert found["message"].startswith(f"{name}: the ResourceVersion in the precondition (")
    assert found["message"].endswith("). The object might have been modified")
    found = api.refused(422, "DELETE", "pods/job?propagationPolicy=Maybe")
    assert found["details"]["causes"][0]["field"] == "propagationPolicy"
    again = bind(api, "job", "elsewhere")[1]
    assert again["message"] == (
        'Operation cannot be fulfilled on pods/binding "job": pod job is already assigned to node '
        '"nowhere"'
    )
    assert api.ask("GET", "pods/job")[1]["spec"]["nodeName"] == "nowhere"


def test_a_collection_is_listed_as_it_was(api: Wire) -> None:
    for name in ("a", "b"):
        api.make(name, metadata={"labels": {"app": "x"}})
    code, listed = api.ask("DELETE", "pods?labelSelector=app%3Dx")
    assert (code, listed["kind"]) == (200, "PodList")
    assert [marks(each) for each in listed["items"]] == [(1, None), (1, None)]
    assert api.ask("DELETE", "pods?labelSelector=app%3Dx")[1]["items"] == []


def test_a_namespace_that_is_being_deleted(api: Wire) -> None:
    code, deleted = api.ask("DELETE", "")
    assert (code, deleted["kind"], deleted["status"]["phase"]) == (200, "Namespace", "Terminating")
    found = api.refused(403, "POST", "pods", pod())
    assert found["message"] == (
        f'pods "job" is forbidden: unable to create new content in namespace {api.namespace} '
        "because it is being terminated"
    )
    assert found["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    assert api.ask("GET", "pods")[0] == 200


def test_resource_versions(api: Wire) -> None:
    ahead = int(revision(api)) + 10**6
    found = api.refused(504, "GET", f"pods?resourceVersion={ahead}")
    assert found["reason"] == "Timeout" and found["details"]["retryAfterSeconds"] == 1
    assert found["message"].startswith(f"Timeout: Too large resource version: {ahead}, current: ")
    wrong = 'resourceVersion: Invalid value: "x": strconv.ParseUint: parsing "x": invalid syntax'
    assert api.refused(400, "GET", "pods?resourceVersion=x") == {
        "reason": "BadRequest",
        "message": f"invalid resource version: {wrong}",
    }
    assert api.refused(500, "GET", "pods?watch=1&resourceVersion=x") == {"message": wrong}
    waits = f"pods?watch=1&timeoutSeconds=1&allowWatchBookmarks=true&resourceVersion={ahead}"
    assert api.ask("GET", waits) == (200, "")  # a bookmark comes before the end of longer ones
    found = api.refused(400, "GET", "pods?fieldSelector=spec.no%3Dx")
    assert found["message"] == "field label not supported: spec.no"
    found = api.refused(400, "GET", "pods?limit=1&continue=x")
    assert found["message"].startswith("invalid continue token: continue key is not valid: ")


def test_logs_that_are_not_there(api: Wire) -> None:
    api.make("job")
    assert api.ask("GET", "pods/job/log") == (204, "")
    found = api.refused(422, "GET", "pods/job/log?tailLines=-1&limitBytes=0&sinceSeconds=0")
    assert found["message"] == (
        'PodLogOptions "job" is invalid: [tailLines: Invalid value: -1: must be greater than or '
        "equal to 0, limitBytes: Invalid value: 0: must be greater than 0, sinceSeconds: Invalid "
        "value: 0: must be greater than 0]"
    )
    assert found["details"]["kind"] == "PodLogOptions"
    found = api.refused(400, "GET", "pods/job/log?tailLines=x")
    assert found["message"] == 'strconv.ParseInt: parsing "x": invalid syntax'
    found = api.refused(400, "GET", "pods/job/log?container=no")
    assert found["message"] == "container no is not valid for pod job"
    both = "pods/job/log?sinceSeconds=5&sinceTime=2026-01-31T00:00:00Z"
    assert "at most one of `sinceTime` or" in api.refused(422, "GET", both)["message"]
    bind(api, "job")
    assert api.refused(404, "GET", "pods/job/log") == {  # it is the node that isn't there
        "reason": "NotFound",
        "message": 'pods "nowhere" not found',
        "details": {"name": "nowhere", "kind": "pods"},
    }
    several = [{"name": name, "image": "i"} for name in "ab"]
    first = [{"name": "z", "image": "i"}]
    api.make("two", containers=several, initContainers=first)
    found = api.refused(400, "GET", "pods/two/log")
    assert found["message"] == (
        "a container name must be specified for pod two, choose one of: [z a b]"
    )
    api.make("one", initContainers=first)
    assert api.ask("GET", "pods/one/log")[0] == 204


def test_logs_of_a_node_that_is_away(cluster: Cluster) -> None:
    cluster.run_pod("job", ["sleep", "60"])
    cluster.wait_for_phase("job", "Running")
    cluster.agent.lose_node()
    found = Wire(cluster).refused(500, "GET", "pods/job/log")
    assert found.keys() == {"message"}
    url, _, rest = found["message"].partition('": dial tcp ')
    assert url.startswith('Get "https://127.0.0.1:')
    assert url.endswith(f"/containerLogs/{cluster.namespace}/job/base")
    assert rest.startswith("127.0.0.1:") and rest.endswith(": connect: connection refused")


def test_a_node_is_tainted_until_it_is_ready(cluster: Cluster) -> None:
    name = f"new-{cluster.namespace}"
    made = cluster.api.create_node({"metadata": {"name": name}})
    try:
        taints = [(each.key, each.effect) for each in made.spec.taints]
        assert taints == [("node.kubernetes.io/not-ready", "NoSchedule")]
    finally:
        cluster.api.delete_node(name)
    with pytest.raises(ApiException) as refused:
        cluster.api.read_node(name)
    assert f'nodes \\"{name}\\" not found' in str(refused.value.body)
