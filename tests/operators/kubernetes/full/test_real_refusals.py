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
RESOURCES = "spec.containers[0].resources"
MERGE = "application/merge-patch+json"


def secret(**changes: Any) -> Any:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, **changes}


@pytest.mark.parametrize(
    ("body", "causes"),
    [
        (
            pod("A_b", container={"name": "M_x", "image": ""}, metadata={"labels": {"a": "b c"}}),
            [
                ("metadata.name", "a lowercase RFC 1123 subdomain must consist of"),
                ("metadata.labels", "a valid label must be"),
                ("spec.containers[0].name", "a lowercase RFC 1123 label must consist of"),
                ("spec.containers[0].image", "Required value"),
            ],
        ),
        (pod("a" * 254), [("metadata.name", "must be no more than 253")]),
        (
            pod(metadata={"labels": {"a": "b" * 64}}, containers=[]),
            [("metadata.labels", "must be no more than 63"), ("spec.containers", "Required value")],
        ),
        (
            pod(containers=[{"name": "a", "image": "i"}] * 2),
            [("spec.containers[1].name", 'Duplicate value: "a"')],
        ),
        (
            pod(**amounts(limits={GPU: "500m"})),
            [
                (f"{RESOURCES}.limits[{GPU}]", "must be an integer"),
                (f"{RESOURCES}.requests[{GPU}]", "must be an integer"),
            ],
        ),
        (pod(**amounts(requests={GPU: 1})), [(f"{RESOURCES}.limits", "Limit must be set for")]),
        (
            pod(**amounts(requests={GPU: "1"}, limits={GPU: "2"})),
            [(f"{RESOURCES}.requests", f"must be equal to {GPU} limit of 2")],
        ),
        (
            pod(**amounts(requests={"cpu": 2}, limits={"cpu": 1})),
            [(f"{RESOURCES}.requests", "must be less than or equal to cpu limit of 1")],
        ),
        (
            pod(**amounts(limits={"gpu": 1})),
            [
                (f"{RESOURCES}.limits[gpu]", "must be a standard resource type or fully qualified"),
                (f"{RESOURCES}.limits[gpu]", "must be a standard resource for containers"),
                (f"{RESOURCES}.requests[gpu]", "must be a standard resource type or"),
                (f"{RESOURCES}.requests[gpu]", "must be a standard resource for containers"),
            ],
        ),
    ],
)
def test_invalid_pods(api: Wire, body: Any, causes: list[tuple[str, str]]) -> None:
    name = body["metadata"]["name"]
    found = api.refused(422, "POST", "pods", body)
    details = found["details"]
    assert (found["reason"], details["name"], details["kind"]) == ("Invalid", name, "Pod")
    for cause, (field, part) in zip(details["causes"], causes, strict=True):
        assert cause["field"] == field and part in cause["message"]
    parts = [f"{each['field']}: {each['message']}" for each in details["causes"]]
    listed = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
    assert found["message"] == f'Pod "{name}" is invalid: {listed}'


def test_an_amount_that_is_none(api: Wire) -> None:
    assert api.refused(400, "POST", "pods", pod(**amounts(limits={"cpu": "many"}))) == {
        "reason": "BadRequest",
        "message": 'Pod in version "v1" cannot be handled as a Pod: quantities must match the '
        "regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
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


def test_patches_that_are_refused(api: Wire) -> None:
    api.make("job")
    label = {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}
    found = api.refused(409, "PATCH", "pods/job", label, MERGE)
    assert (found["reason"], found["message"]) == (
        "Conflict",
        'Operation cannot be fulfilled on pods "job": the object has been modified; please apply '
        "your changes to the latest version and try again",
    )
    found = api.refused(422, "PATCH", "pods/job", {"metadata": {"uid": "1"}}, MERGE)
    assert found["message"] == (
        'Pod "job" is invalid: metadata.uid: Invalid value: "1": field is immutable'
    )
    unknown = api.refused(415, "PATCH", "pods/job", {}, "application/json")
    assert unknown["message"] == "415: Unsupported Media Type"


def test_secrets(api: Wire) -> None:
    code, made = api.ask("POST", "secrets", secret(stringData={"a": "b"}))
    assert (code, made["data"], made["type"]) == (201, {"a": "Yg=="}, "Opaque")
    found = api.refused(422, "POST", "secrets", secret(stringData={"a": "x" * (2**20 + 1)}))
    assert [each["field"] for each in found["details"]["causes"]] == ["data"]
    assert api.ask("DELETE", "secrets/keys")[0] == 200
    assert api.ask("GET", "secrets/keys")[0] == 404


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
