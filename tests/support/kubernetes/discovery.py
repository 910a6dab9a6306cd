"""What the API says about itself: its version, groups and resources."""

from __future__ import annotations

from support.kubernetes.schema import VERSION
from support.kubernetes.status import Object
from support.kubernetes.store import RESOURCES

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_GROUPS = ("authorization.k8s.io", "scheduling.k8s.io")


def answer(path: str) -> Object | None:
    """The answer to a request for one of these paths; None for others."""
    path = path.rstrip("/")
    if path == "/version":
        major, minor, _ = VERSION.split(".")
        return {
            "major": major,
            "minor": minor,
            "gitVersion": f"v{VERSION}",
            "gitCommit": "0" * 40,
            "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z",
            "goVersion": "go1.25",
            "compiler": "gc",
            "platform": "linux/amd64",
        }
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        groups = [_group(name) for name in _GROUPS]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/api/v1":
        return _resources("")
    for name in _GROUPS:
        if path == f"/apis/{name}":
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(name)}
        if path == f"/apis/{name}/v1":
            return _resources(name)
    return None


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resources(group: str) -> Object:
    listed = [
        {
            "name": each.plural,
            "singularName": each.kind.lower(),
            "namespaced": each.namespaced,
            "kind": each.kind,
            "verbs": _VERBS,
            **({"shortNames": [each.short]} if each.short else {}),
        }
        for each in RESOURCES.values()
        if each.group == group
    ]
    if group == "authorization.k8s.io":
        kind = "SelfSubjectAccessReview"
        listed.append(
            {
                "name": "selfsubjectaccessreviews",
                "singularName": kind.lower(),
                "namespaced": False,
                "kind": kind,
                "verbs": ["create"],
            }
        )
    version = f"{group}/v1" if group else "v1"
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": listed,
    }
