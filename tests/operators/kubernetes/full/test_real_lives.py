"""Deletions, bindings, watches and logs as a real API server has them (1.36.2)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from kubernetes import watch
from support.kubernetes.cluster import Cluster
from support.kubernetes.wire import Wire

MERGE = "application/merge-patch+json"


def bind(api: Wire, name: str, node: str = "nowhere") -> tuple[int, Any]:
    """What the scheduler does; the node needn't be there."""
    body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
    return api.ask("POST", f"pods/{name}/binding", body)


def grace_s(body: Any) -> int | None:
    """A pod's grace period; None if it isn't being deleted."""
    period: int | None = body["metadata"].get("deletionGracePeriodSeconds")
    return period


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
        found.append((each["type"], metadata.deletion_grace_period_seconds))
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
    assert grace_s(gone) == 0
    assert changes(api, "job", begun) == [
        ("ADDED", None),
        ("MODIFIED", 0),
        ("DELETED", 0),
    ]


def test_a_grace_period_only_gets_shorter(api: Wire) -> None:
    made = api.make("job", terminationGracePeriodSeconds=50)
    bind(api, "job")
    bound = api.ask("GET", "pods/job")[1]
    assert bound["spec"]["nodeName"] == "nowhere" and grace_s(bound) is None
    (condition,) = bound["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    begun = datetime.fromisoformat(made["metadata"]["creationTimestamp"])
    first = api.ask("DELETE", "pods/job", {"gracePeriodSeconds": 20})[1]
    assert grace_s(first) == 20
    assert timedelta(seconds=20) <= grace_left(first, begun) < timedelta(seconds=30)
    for query in ("", "?gracePeriodSeconds=40"):
        code, again = api.ask("DELETE", f"pods/job{query}")
        assert (code, again["metadata"]) == (200, first["metadata"])
    shorter = api.ask("DELETE", "pods/job?gracePeriodSeconds=5")[1]
    assert grace_s(shorter) == 5
    assert grace_left(first, begun) - grace_left(shorter, begun) == timedelta(seconds=15)
    gone = api.ask("DELETE", "pods/job?gracePeriodSeconds=0")[1]
    assert grace_s(gone) == 0
    assert api.ask("DELETE", "pods/job")[0] == 404
    assert changes(api, "job", made["metadata"]["resourceVersion"]) == [
        ("MODIFIED", None),
        ("MODIFIED", 20),
        ("MODIFIED", 5),
        ("MODIFIED", 0),
        ("DELETED", 0),
    ]


def test_a_pod_that_has_ended_goes_at_once(api: Wire) -> None:
    api.make("job")
    bind(api, "job")
    patch = {"status": {"phase": "Failed"}}
    assert api.ask("PATCH", "pods/job/status", patch, MERGE)[0] == 200
    assert grace_s(api.ask("DELETE", "pods/job")[1]) == 0
    assert api.ask("GET", "pods/job")[0] == 404


def test_what_is_being_deleted(api: Wire) -> None:
    begun = revision(api)
    api.make("job", metadata={"finalizers": ["batchllm.io/a"]})
    assert grace_s(api.ask("DELETE", "pods/job")[1]) == 0
    code, refused = bind(api, "job")
    assert code == 409 and refused["message"] == (
        'Operation cannot be fulfilled on pods/binding "job": pod job is being deleted, cannot be '
        "assigned to a host"
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
    again = bind(api, "job", "elsewhere")[1]
    assert again["message"] == (
        'Operation cannot be fulfilled on pods/binding "job": pod job is already assigned to node '
        '"nowhere"'
    )
    assert api.ask("GET", "pods/job")[1]["spec"]["nodeName"] == "nowhere"


def test_logs_that_are_not_there(api: Wire) -> None:
    api.make("job")
    assert api.ask("GET", "pods/job/log") == (204, "")
    found = api.refused(400, "GET", "pods/job/log?container=no")
    assert found["message"] == "container no is not valid for pod job"
    bind(api, "job")
    assert api.ask("GET", "pods/job/log")[0] == 404  # it is the node that isn't there
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
