"""What an API server adds to new objects of those that their authors left out."""

from __future__ import annotations

import base64

from support.kubernetes.status import Object


def set_defaults(kind: str, body: Object) -> None:
    """Fill in, in place, what pods and Secrets lack."""
    if kind == "Pod":
        body["status"] = {"phase": "Pending"}
        spec = body.setdefault("spec", {})
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("schedulerName", "default-scheduler")
        for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
            container.setdefault("imagePullPolicy", "IfNotPresent")
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("terminationMessagePolicy", "File")
            resources = container.setdefault("resources", {})
            for name, limit in resources.get("limits", {}).items():
                resources.setdefault("requests", {}).setdefault(name, limit)
    elif kind == "Job":
        body["status"] = {}
        spec = body["spec"]
        for name in ("completions", "parallelism"):
            spec.setdefault(name, 1)
        for container in spec["template"]["spec"]["containers"]:
            container.setdefault("resources", {})
    elif kind == "Secret":
        for key, value in body.pop("stringData", {}).items():
            body.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        body.setdefault("type", "Opaque")
