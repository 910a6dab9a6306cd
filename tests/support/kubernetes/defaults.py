"""What an API server adds to new objects: default values, and its admission plugins' part."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from support.kubernetes.quantities import container_amounts
from support.kubernetes.status import Object

_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_COMPUTE = ("cpu", "memory")
# Without vowels, so that names made of it are no words.
SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def random_suffix(length: int = 5) -> str:
    """The end of a generated name."""
    return "".join(secrets.choice(SUFFIX_LETTERS) for _ in range(length))


def set_defaults(kind: str, body: Object) -> None:
    """Fill in, in place, what the object's author left out."""
    if kind == "Pod":
        _pod_defaults(body.setdefault("spec", {}))
        body["status"] = {"phase": "Pending", "qosClass": _quality_of_service(body["spec"])}
    elif kind == "Secret":
        for key, value in (body.pop("stringData", None) or {}).items():
            body.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        body.setdefault("type", "Opaque")
    elif kind == "Event":
        body.setdefault("eventTime", None)
        body.setdefault("reportingComponent", "")
        body.setdefault("reportingInstance", "")
    elif kind == "Namespace":
        body.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
        body["status"] = {"phase": "Active"}
        labels = body["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = body["metadata"]["name"]
    elif kind == "Node":
        status = body.setdefault("status", {})
        if "capacity" in status:
            status.setdefault("allocatable", dict(status["capacity"]))
    elif kind == "ResourceQuota":
        body.setdefault("status", {})
    elif kind == "PriorityClass":
        body.setdefault("preemptionPolicy", "PreemptLowerPriority")


def _pod_defaults(spec: Object) -> None:
    for key, value in {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "securityContext": {},
    }.items():
        spec.setdefault(key, value)
    if spec["terminationGracePeriodSeconds"] < 0:
        spec["terminationGracePeriodSeconds"] = 1
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        _container_defaults(container)
    for volume in spec.get("volumes", []):
        _volume_defaults(volume)


def _container_defaults(container: Object) -> None:
    last = str(container.get("image", "")).rpartition("/")[2]
    latest = ":" not in last or last.endswith(":latest")
    pull_policy = "Always" if latest and "@" not in last else "IfNotPresent"
    for key, value in {
        "imagePullPolicy": pull_policy,
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
    }.items():
        container.setdefault(key, value)
    resources = container["resources"]
    for name, value in resources.get("limits", {}).items():
        resources.setdefault("requests", {}).setdefault(name, value)
    for port in container.get("ports", []):
        port.setdefault("protocol", "TCP")
    for variable in container.get("env", []):
        if field := variable.get("valueFrom", {}).get("fieldRef"):
            field.setdefault("apiVersion", "v1")
        if field := variable.get("valueFrom", {}).get("resourceFieldRef"):
            field.setdefault("divisor", "0")


def _volume_defaults(volume: Object) -> None:
    if len(volume) == 1:  # its name alone
        volume["emptyDir"] = {}
    for source in ("secret", "configMap", "projected", "downwardAPI"):
        if source in volume:
            volume[source].setdefault("defaultMode", 0o644)
    if "hostPath" in volume:
        volume["hostPath"].setdefault("type", "")


def _quality_of_service(spec: Object) -> str:
    containers = [*spec.get("initContainers", []), *spec.get("containers", [])]
    amounts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {k: v for k, v in container_amounts(each, "requests").items() if k in _COMPUTE and v},
            {k: v for k, v in container_amounts(each, "limits").items() if k in _COMPUTE and v},
        )
        for each in containers
    ]
    if not any(requests or limits for requests, limits in amounts):
        return "BestEffort"
    full = all(len(limits) == 2 and requests == limits for requests, limits in amounts)
    return "Guaranteed" if full else "Burstable"


def add_service_account(spec: Object, automount: bool) -> None:
    """What the ServiceAccount plugin adds: the account's name, and its token as a volume."""
    spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = spec["serviceAccountName"]
    containers = [*spec.get("initContainers", []), *spec.get("containers", [])]
    without = [
        each
        for each in containers
        if all(mount.get("mountPath") != _TOKEN_FOLDER for mount in each.get("volumeMounts", []))
    ]
    if not spec.get("automountServiceAccountToken", automount) or not without:
        return
    volume = f"kube-api-access-{random_suffix()}"
    for each in without:
        mount = {"name": volume, "mountPath": _TOKEN_FOLDER, "readOnly": True}
        each.setdefault("volumeMounts", []).append(mount)
    namespace = {
        "path": "namespace",
        "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
    }
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    projected = {"defaultMode": 0o644, "sources": sources}
    spec.setdefault("volumes", []).append({"name": volume, "projected": projected})


def add_tolerations(spec: Object) -> None:
    """What the DefaultTolerationSeconds plugin adds: five minutes on a node that is lost."""
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(each.get("key") in (key, None) for each in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )


def generated_name(prefix: str) -> str:
    """A name that begins with `prefix`, cut so that the suffix fits."""
    return prefix[:58] + random_suffix()
