"""The API's verbs on the store, without HTTP: everything that a request can do to an object."""

from __future__ import annotations

from typing import Any

from support.kubernetes import deletion
from support.kubernetes.defaults import set_defaults
from support.kubernetes.quotas import charge_quotas
from support.kubernetes.selectors import Match
from support.kubernetes.status import Object, conflict, invalid
from support.kubernetes.store import RESOURCES, Store, Target, now_text
from support.kubernetes.validation import check, invalid_value

_MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


class Operations:
    """Reads and writes of the API."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, target: Target) -> Object:
        return self.store.get(target.resource, target.namespace, target.name)

    def list(self, target: Target, match: Match, limit: int = 0) -> Object:
        items = self.store.items(target.resource, target.namespace)
        matching = [each for each in items if match(each)]
        return {
            "kind": f"{target.resource.kind}List",
            "apiVersion": target.resource.version,
            "metadata": {"resourceVersion": str(self.store.revision)},
            "items": matching[: limit or None],
        }

    def create(self, target: Target, body: Object) -> Object:
        """Complete, check and store a new object."""
        kind, metadata = target.resource.kind, body.setdefault("metadata", {})
        body |= {"apiVersion": target.resource.version, "kind": kind}
        if target.resource.namespaced:
            self.store.get(RESOURCES["namespaces"], "", target.namespace)
            metadata["namespace"] = target.namespace
        set_defaults(kind, body)
        check(kind, body)
        if kind == "Pod":
            charge_quotas(self.store, body)
        return self.store.create(target.resource, body)

    def patch(self, target: Target, patch: Object) -> Object:
        """Merge into an object; `status` into its status only, and nothing else into that.

        Raises:
            ApiError: 409, the patch names another version; 422, or another uid.
        """
        resource, before = target.resource, self.get(target)
        old, given = before["metadata"], patch.get("metadata", {})
        if given.get("resourceVersion", old["resourceVersion"]) != old["resourceVersion"]:
            raise conflict(resource.plural, target.name, _MODIFIED)
        if given.get("uid", old["uid"]) != old["uid"]:
            cause = invalid_value("metadata.uid", given["uid"], "field is immutable")
            raise invalid(resource.kind, target.name, [cause])
        after = _merged(before, patch)
        if target.subresource == "status":
            after = {**before, "status": after["status"]}
        elif "status" in before:
            after["status"] = before["status"]
        check(resource.kind, after)
        if deletion.is_due(after):
            return self.store.remove(resource, after)
        return self.store.replace(resource, after)

    def delete(self, target: Target, options: Object) -> Object:
        """Delete an object, and what is in it; return its last version."""
        before = self.get(target)
        if target.resource.kind == "Namespace":
            for resource in RESOURCES.values():
                for each in self.store.items(resource, target.name):
                    self.store.remove(resource, each)
        return deletion.delete(self.store, target.resource, before, options)

    def bind(self, target: Target, node: str) -> None:
        """Put a pod on a node.

        Raises:
            ApiError: 404, no such pod; 409, it has a node or is being deleted.
        """
        pod, name, why = self.get(target), target.name, ""
        if "deletionTimestamp" in pod["metadata"]:
            why = f"pod {name} is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("nodeName"):
            why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        if why:
            raise conflict("pods/binding", name, why)
        others = [
            each for each in pod["status"].get("conditions", []) if each["type"] != "PodScheduled"
        ]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now_text()}
        status = {**pod["status"], "conditions": [*others, scheduled]}
        spec = {**pod["spec"], "nodeName": node}
        self.store.replace(target.resource, {**pod, "spec": spec, "status": status})


def _merged(current: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(current) if isinstance(current, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
