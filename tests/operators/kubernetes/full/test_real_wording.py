"""What a real API server answers, word for word where a client could tell the difference.

Each test was written against kube-apiserver 1.36.2; run with `--kubeconfig` it holds there, so that
the double is held to the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.kubernetes.wire import Wire, amounts, pod

GPU = "nvidia.com/gpu"
MERGE = "application/merge-patch+json"


def test_a_minimal_pod_is_completed(api: Wire) -> None:
    body = {"metadata": {"name": "job"}, "spec": {"containers": [{"name": "base", "image": "job"}]}}
    code, made = api.ask("POST", "pods", body)
    spec, metadata = made["spec"], made["metadata"]
    (container,) = spec.pop("containers")
    (mount,) = container.pop("volumeMounts")
    (volume,) = spec.pop("volumes")
    assert code == 201 and made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    assert metadata["generation"] == 1 and metadata["namespace"] == api.namespace
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    assert spec == {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "default",
        "serviceAccount": "default",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "tolerations": [
            {"key": "node.kubernetes.io/not-ready", **lost},
            {"key": "node.kubernetes.io/unreachable", **lost},
        ],
        "priority": 0,
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
    }
    assert container == {
        "name": "base",
        "image": "job",
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always",
    }
    assert volume["name"] == mount["name"] and volume["projected"]["defaultMode"] == 0o644
    bare = api.make("bare", automountServiceAccountToken=False, terminationGracePeriodSeconds=-5)
    assert "volumes" not in bare["spec"] and bare["spec"]["terminationGracePeriodSeconds"] == 1


def test_quantities_are_written_anew(api: Wire) -> None:
    limits = {"cpu": 0.5, "memory": "2048Mi", GPU: 1, "ephemeral-storage": "1000M"}
    made = api.make("job", **amounts(limits=limits, requests={"memory": "0.5Gi", "cpu": "0.1"}))
    resources = made["spec"]["containers"][0]["resources"]
    assert resources == {
        "limits": {"cpu": "500m", "memory": "2Gi", GPU: "1", "ephemeral-storage": "1G"},
        "requests": {"cpu": "100m", "memory": "512Mi", GPU: "1", "ephemeral-storage": "1G"},
    }
    assert made["status"]["qosClass"] == "Burstable"


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (pod(container={"image": ""}), ["spec.containers[0].image"]),
        (
            pod(
                "A_b",
                container={"name": "M_x", "image": "", "imagePullPolicy": "x"},
                restartPolicy="No",
            ),
            [
                "metadata.name",
                "spec.containers[0].name",
                "spec.containers[0].image",
                "spec.containers[0].imagePullPolicy",
                "spec.restartPolicy",
            ],
        ),
        (
            pod(**amounts(limits={GPU: "500m"})),
            [
                f"spec.containers[0].resources.limits[{GPU}]",
                f"spec.containers[0].resources.requests[{GPU}]",
            ],
        ),
        (pod(**amounts(requests={GPU: 1})), ["spec.containers[0].resources.limits"]),
        (
            pod(**amounts(requests={"cpu": 2}, limits={"cpu": 1})),
            ["spec.containers[0].resources.requests"],
        ),
        (
            pod(**amounts(limits={"gpu": 1})),
            [
                "spec.containers[0].resources.limits[gpu]",
                "spec.containers[0].resources.limits[gpu]",
                "spec.containers[0].resources.requests[gpu]",
                "spec.containers[0].resources.requests[gpu]",
            ],
        ),
        (pod(nodeSelector={"a": "b c"}), ["spec.nodeSelector"]),
        (
            pod(tolerations=[{"key": "a", "operator": "Exists", "value": "v"}]),
            ["spec.tolerations[0].operator"],
        ),
        (
            pod(volumes=[{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]),
            ["spec.volumes[0].secret"],
        ),
        (pod(container={"env": [{"name": ""}]}), ["spec.containers[0].env[0].name"]),
        (
            pod(metadata={"labels": {"a": "b c"}}, containers=[]),
            ["metadata.labels", "spec.containers"],
        ),
        (pod(metadata={"annotations": {"a": "x" * 2**18}}), ["metadata.annotations"]),
        (pod("a" * 254), ["metadata.name"]),
    ],
)
def test_causes_have_an_order(api: Wire, body: Any, fields: list[str]) -> None:
    name = body["metadata"]["name"]
    found = api.refused(422, "POST", "pods", body)
    details = found["details"]
    assert (found["reason"], details["name"], details["kind"]) == ("Invalid", name, "Pod")
    assert [each["field"] for each in details["causes"]] == fields
    parts = [f"{each['field']}: {each['message']}" for each in details["causes"]]
    listed = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
    assert found["message"] == f'Pod "{name}" is invalid: {listed}'


UNDECODABLE = 'Pod in version "v1" cannot be handled as a Pod: '


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            pod(**amounts(limits={"cpu": "many"})),
            UNDECODABLE + "quantities must match the regular expression "
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
        (
            pod(container={"env": [{"name": "A", "value": 1}]}),
            UNDECODABLE + "json: cannot unmarshal number into Go struct field "
            "EnvVar.spec.containers.env.value of type string",
        ),
        (
            pod(containers="x"),
            UNDECODABLE + "json: cannot unmarshal string into Go struct field "
            "PodSpec.spec.containers of type []v1.Container",
        ),
        (
            pod(priority="high"),
            UNDECODABLE + "json: cannot unmarshal string into Go struct field "
            "PodSpec.spec.priority of type int32",
        ),
        (
            pod(nodeSelector={"a": 1}),
            UNDECODABLE + "json: cannot unmarshal number into Go struct field "
            "PodSpec.spec.nodeSelector of type string",
        ),
        (
            pod() | {"apiVersion": "v2"},
            'Pod in version "v2" cannot be handled as a Pod: no kind "Pod" is registered for '
            'version "v2" in scheme "k8s.io/kubernetes/pkg/api/legacyscheme/scheme.go:30"',
        ),
        (
            pod(metadata={"namespace": "other"}),
            "the namespace of the provided object does not match the namespace sent on the request",
        ),
    ],
)
def test_bodies_that_are_not_understood(api: Wire, body: Any, message: str) -> None:
    assert api.refused(400, "POST", "pods", body) == {"reason": "BadRequest", "message": message}


def test_strict_and_dry_requests(api: Wire) -> None:
    assert api.refused(400, "POST", "pods?fieldValidation=Strict", pod(noSuch=1)) == {
        "reason": "BadRequest",
        "message": f'{UNDECODABLE}strict decoding error: unknown field "spec.noSuch"',
    }
    code, made = api.ask("POST", "pods?dryRun=All", pod(noSuch=1))
    assert code == 201 and made["metadata"]["uid"] and "noSuch" not in made["spec"]
    assert api.ask("GET", "pods/job")[0] == 404
    found = api.refused(422, "POST", "pods?dryRun=maybe", pod())
    assert found["message"] == (
        'CreateOptions.meta.k8s.io "" is invalid: dryRun: Unsupported value: ["maybe"]: supported '
        'values: "All"'
    )
    api.make("job")
    assert api.ask("DELETE", "pods/job?dryRun=All")[0] == 200
    assert (
        api.ask("PATCH", "pods/job?dryRun=All", {"metadata": {"labels": {"a": "b"}}}, MERGE)[0]
        == 200
    )
    assert "labels" not in api.ask("GET", "pods/job")[1]["metadata"]
