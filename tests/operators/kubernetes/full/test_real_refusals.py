"""What a real API server (1.36.2) refuses once it understands a request, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client as kube
from kubernetes import config as kube_config
from support.kubernetes.cluster import Cluster
from support.kubernetes.wire import Wire, amounts, pod

GPU = "nvidia.com/gpu"
UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


def secret(**changes: Any) -> Any:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, **changes}


def test_what_admission_refuses(api: Wire) -> None:
    details = {"name": "job", "kind": "pods"}
    for spec, why in (
        (
            {"serviceAccountName": "nobody"},
            f'error looking up service account {api.namespace}/nobody: serviceaccount "nobody" not '
            "found",
        ),
        ({"priorityClassName": "no"}, "no PriorityClass with name no was found"),
        ({"runtimeClassName": "no"}, 'pod rejected: RuntimeClass "no" not found'),
    ):
        assert api.refused(403, "POST", "pods", pod(**spec)) == {
            "reason": "Forbidden",
            "message": f'pods "job" is forbidden: {why}',
            "details": details,
        }


def test_quotas_count_in_their_status(api: Wire) -> None:
    hard = {"pods": "2", "requests.memory": "3Gi", f"requests.{GPU}": "1"}
    api.cluster.set_quota(hard)
    found = api.refused(403, "POST", "pods", pod())
    why = "failed quota: quota: must specify requests.memory for: base"
    assert found["message"] == f'pods "job" is forbidden: {why}'
    big = amounts(limits={GPU: 2, "memory": "4096Mi"})
    found = api.refused(403, "POST", "pods", pod(**big))
    assert found["details"] == {"name": "job", "kind": "pods"}
    over = f"requests.memory={{}}Gi,requests.{GPU}={{}}"
    assert found["message"] == (
        'pods "job" is forbidden: exceeded quota: quota, '
        f"requested: {over.format(4, 2)}, used: {over.format(0, 0).replace('0Gi', '0')}, "
        f"limited: {over.format(3, 1)}"
    )
    one = amounts(limits={GPU: 1, "memory": "1Gi"})
    api.make("job", **one)
    used = api.ask("GET", "resourcequotas/quota")[1]["status"]["used"]  # in the same moment
    assert used == {"pods": "1", "requests.memory": "1Gi", f"requests.{GPU}": "1"}
    found = api.refused(403, "POST", "pods", pod(**one))  # not: exists already
    name = f"requests.{GPU}"
    assert found["message"] == (
        'pods "job" is forbidden: exceeded quota: quota, '
        f"requested: {name}=1, used: {name}=1, limited: {name}=1"
    )


def test_names_that_are_taken_or_missing(api: Wire) -> None:
    api.make("job")
    assert api.refused(409, "POST", "pods", pod()) == {
        "reason": "AlreadyExists",
        "message": 'pods "job" already exists',
        "details": {"name": "job", "kind": "pods"},
    }
    missing = {"metadata": {"labels": {"a": "b"}}}
    for request in (
        ("GET", "pods/no"),
        ("DELETE", "pods/no"),
        ("PATCH", "pods/no", missing, MERGE),
    ):
        assert api.refused(404, *request) == {
            "reason": "NotFound",
            "message": 'pods "no" not found',
            "details": {"name": "no", "kind": "pods"},
        }
    assert api.refused(404, "GET", "podz") == {
        "reason": "NotFound",
        "message": "the server could not find the requested resource",
        "details": {},
    }
    assert api.refused(405, "POST", "pods/job", pod())["details"] == {}


def test_conflicts_and_changes_that_are_refused(api: Wire) -> None:
    old = api.make("job")
    label = {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}
    modified = (
        'Operation cannot be fulfilled on pods "job": the object has been modified; please apply '
        "your changes to the latest version and try again"
    )
    for method, kind in (("PATCH", MERGE), ("PUT", "application/json")):
        body = (
            label if method == "PATCH" else old | {"metadata": old["metadata"] | label["metadata"]}
        )
        found = api.refused(409, method, "pods/job", body, kind)
        assert (found["reason"], found["message"]) == ("Conflict", modified)
    found = api.refused(422, "PATCH", "pods/job", {"metadata": {"uid": "1"}}, MERGE)
    assert found["message"] == (
        'Pod "job" is invalid: metadata.uid: Invalid value: "1": field is immutable'
    )
    assert len(found["details"]["causes"]) == 2
    stranger = old | {"metadata": old["metadata"] | {"uid": UNKNOWN_UID}}
    found = api.refused(409, "PUT", "pods/job", stranger)
    assert f"Precondition failed: UID in precondition: {UNKNOWN_UID}," in found["message"]
    renamed = {"metadata": {"name": "other"}}
    assert api.refused(400, "PATCH", "pods/job", renamed, MERGE)["message"] == (
        "the name of the object (other) does not match the name on the URL (job)"
    )
    failing = [{"op": "test", "path": "/metadata/name", "value": "x"}]
    assert api.refused(422, "PATCH", "pods/job", failing, JSON_PATCH) == {
        "reason": "Invalid",
        "message": "the server rejected our request due to an error in our request",
        "details": {},
    }
    broken = api.refused(400, "PATCH", "pods/job", "{", MERGE)
    assert broken["message"].startswith("error decoding patch: ")
    unknown = api.refused(415, "PATCH", "pods/job", "{}", "application/json")
    assert unknown["message"] == "415: Unsupported Media Type"
    for seconds, code in ((100, 200), (200, 422)):
        patch = {"spec": {"activeDeadlineSeconds": seconds}}
        assert api.ask("PATCH", "pods/job", patch, MERGE)[0] == code


def test_secrets(api: Wire) -> None:
    code, made = api.ask("POST", "secrets", secret(stringData={"a": "b"}))
    assert (code, made["data"], made["type"]) == (201, {"a": "Yg=="}, "Opaque")
    for body, field in (
        (secret(stringData={"a b": "x"}), "data[a b]"),
        (secret(stringData={"a": "x" * (2**20 + 1)}), "data"),
    ):
        found = api.refused(422, "POST", "secrets", body)
        assert [each["field"] for each in found["details"]["causes"]] == [field]
    assert api.refused(400, "POST", "secrets", secret(data={"a": "???"}))["message"] == (
        'Secret in version "v1" cannot be handled as a Secret: illegal base64 data at input byte 0'
    )
    found = api.refused(422, "PATCH", "secrets/keys", {"type": "x/y"}, MERGE)
    assert found["details"]["causes"][0]["field"] == "type"
    code, gone = api.ask("DELETE", "secrets/keys")
    assert (code, gone["status"], gone["details"]["kind"]) == (200, "Success", "secrets")
    assert gone["details"]["uid"] == made["metadata"]["uid"] and "code" not in gone
    large = api.refused(413, "POST", "secrets", secret(data={"a": "x" * (3 * 2**20)}))
    assert large["message"] == "Request entity too large: limit is 3145728"


def test_events(api: Wire) -> None:
    involved = {"kind": "Pod", "name": "job", "namespace": api.namespace}
    body = {"metadata": {"name": "e"}, "involvedObject": involved, "reason": "R", "message": "m"}
    code, made = api.ask("POST", "events", body)
    assert code == 201 and made["eventTime"] is None and made["reportingComponent"] == ""
    listed = api.ask("GET", "events?fieldSelector=involvedObject.name%3Djob,reason%3DR")[1]
    assert [each["metadata"]["name"] for each in listed["items"]] == ["e"]
    body = body | {"involvedObject": involved | {"namespace": "other"}}
    found = api.refused(422, "POST", "events", body)
    assert [each["field"] for each in found["details"]["causes"]] == ["involvedObject.namespace"]


def user_without_rights(cluster: Cluster) -> tuple[str, str]:
    """The token of a user who may do nothing, and the user's name."""
    if cluster.backend.double:
        cluster.double.deny("*", "*")
        return cluster.double.access.user_token, cluster.double.access.user
    return (
        cluster.service_account_token(),
        f"system:serviceaccount:{cluster.namespace}:default",
    )


def client_with(cluster: Cluster, token: str) -> kube.ApiClient:
    """A client of this user; the proxy isn't asked, since it may have a certificate of its own."""
    configuration = kube.Configuration()
    path = str(cluster.backend.admin_kubeconfig)
    kube_config.load_kube_config(path, client_configuration=configuration)
    configuration.cert_file = configuration.key_file = configuration.refresh_api_key_hook = None
    configuration.api_key = {}
    return kube.ApiClient(configuration, "authorization", f"Bearer {token}")


def test_rights(api: Wire) -> None:
    token, user = user_without_rights(api.cluster)
    client = client_with(api.cluster, token)
    pods = kube.CoreV1Api(client)
    calls: list[tuple[Callable[[], Any], str, str, str]] = [
        (lambda: pods.list_namespaced_pod(api.namespace), "list", "pods", ""),
        (lambda: pods.read_namespaced_pod("job", api.namespace), "get", "pods", "job"),
        (lambda: pods.create_namespaced_pod(api.namespace, pod()), "create", "pods", ""),
        (lambda: pods.read_namespaced_pod_log("job", api.namespace), "get", "pods/log", "job"),
        (lambda: pods.delete_namespaced_secret("s", api.namespace), "delete", "secrets", "s"),
    ]
    for call, verb, resource, name in calls:
        with pytest.raises(kube.ApiException) as refused:
            call()
        body = json.loads(refused.value.body)
        plural = resource.partition("/")[0]
        subject = f'{plural} "{name}"' if name else plural
        assert (refused.value.status, body["reason"]) == (403, "Forbidden")
        assert body["message"] == (
            f'{subject} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API '
            f'group "" in the namespace "{api.namespace}"'
        )
        assert body["details"] == {"kind": plural, **({"name": name} if name else {})}
    client.close()
    client = client_with(api.cluster, "nobody's")
    with pytest.raises(kube.ApiException) as refused:
        kube.CoreV1Api(client).list_namespaced_pod(api.namespace)
    body = json.loads(refused.value.body)
    assert (body["code"], body["reason"], body["message"]) == (401, "Unauthorized", "Unauthorized")
    assert "details" not in body
    client.close()
