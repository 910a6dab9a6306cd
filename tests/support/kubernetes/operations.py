"""The API's verbs on the store, without HTTP: everything that a request can do to an object."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.kubernetes import deletion
from support.kubernetes.admission import admit_pod, check_quotas
from support.kubernetes.defaults import generated_name, set_defaults
from support.kubernetes.patches import patched
from support.kubernetes.schema import prune
from support.kubernetes.selectors import field_selector, label_selector
from support.kubernetes.status import (
    Cause,
    Object,
    bad_request,
    conflict,
    expired,
    invalid,
    object_modified,
)
from support.kubernetes.store import RESOURCES, Resource, Store, now_text
from support.kubernetes.validation import (
    check,
    check_pod_update,
    metadata_causes,
    normalise_quantities,
)

Match = Callable[[Object], bool]
_KEPT_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
    "name",
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about; an empty name means all objects."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def matcher(resource: Resource, labels: str, fields: str) -> Match:
    """A test for both selectors of a request."""
    by_labels, by_fields = label_selector(labels), field_selector(fields, resource.plural)
    return lambda each: by_labels(each["metadata"].get("labels") or {}) and by_fields(each)


class Operations:
    """Reads and writes of the API."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def create(self, target: Target, body: Object, strict: bool, dry_run: bool) -> Object:
        """Complete, check and store a new object."""
        resource, kind = target.resource, target.resource.kind
        body = self._decoded(resource, body, strict)
        metadata = body.setdefault("metadata", {})
        for field in ("uid", "creationTimestamp", "resourceVersion", "deletionTimestamp"):
            metadata.pop(field, None)
        self._place(target, metadata)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = generated_name(metadata["generateName"])
        set_defaults(kind, body)
        if kind == "Pod":
            metadata["generation"] = 1
            admit_pod(self.store, body)
        check(kind, body)
        if kind == "Pod" and self.store.find(resource, target.namespace, metadata["name"]) is None:
            check_quotas(self.store, body)
        if dry_run:
            return body
        stored = self.store.create(resource, body)
        if kind == "Namespace":
            self._furnish(metadata["name"])
        return stored

    def _decoded(self, resource: Resource, body: Object, strict: bool) -> Object:
        kind, version = resource.kind, resource.api_version
        if body.get("kind", kind) != kind or body.get("apiVersion", version) != version:
            raise bad_request(
                f'{body.get("kind")} in version "{body.get("apiVersion")}" cannot be handled as a '
                f"{kind}: no kind {body.get('kind')!r} is registered for this path"
            )
        body, unknown = prune(kind, body)
        if unknown and strict:
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise bad_request(
                f'{kind} in version "v1" cannot be handled as a {kind}: '
                f"strict decoding error: {listed}"
            )
        body["apiVersion"], body["kind"] = version, kind
        normalise_quantities(kind, body)
        return body

    def _place(self, target: Target, metadata: Object) -> None:
        """Put the request's namespace into the object."""
        if not target.resource.namespaced:
            metadata.pop("namespace", None)
            return
        self.store.get(RESOURCES["namespaces"], "", target.namespace)
        if metadata.get("namespace", target.namespace) != target.namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        metadata["namespace"] = target.namespace

    def _furnish(self, namespace: str) -> None:
        """What controllers put into each new namespace."""
        account = Target(RESOURCES["serviceaccounts"], namespace)
        self.create(account, {"metadata": {"name": "default"}}, False, False)
        authority = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
        self.create(Target(RESOURCES["configmaps"], namespace), authority, False, False)

    def get(self, target: Target) -> Object:
        return self.store.get(target.resource, target.namespace, target.name)

    def listed(self, target: Target, match: Match, limit: int, token: str) -> Object:
        """A list object; `limit` 0 means all."""
        found = [
            each for each in self.store.items(target.resource, target.namespace) if match(each)
        ]
        metadata: Object = {"resourceVersion": str(self.store.revision)}
        start = self._continued(token)
        page = found[start : start + limit] if limit else found[start:]
        if limit and start + limit < len(found):
            place = json.dumps({"revision": self.store.revision, "start": start + limit})
            metadata["continue"] = base64.urlsafe_b64encode(place.encode()).decode()
            metadata["remainingItemCount"] = len(found) - start - limit
        plain = [{k: v for k, v in e.items() if k not in ("kind", "apiVersion")} for e in page]
        resource = target.resource
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": plain,
        }

    def _continued(self, token: str) -> int:
        if not token:
            return 0
        try:
            place = json.loads(base64.urlsafe_b64decode(token))
        except ValueError as error:
            raise bad_request(f"continue key is not valid: {error}") from error
        if place["revision"] < self.store.oldest_revision:
            raise expired(
                "The provided continue parameter is too old to display a consistent list result. "
                "You can start a new list without the continue parameter."
            )
        return int(place["start"])

    def replace(self, target: Target, body: Object, strict: bool) -> Object:
        """PUT: the whole object, or the part that a subresource names."""
        before = self.get(target)
        body = self._decoded(target.resource, body, strict)
        name = body.setdefault("metadata", {}).get("name", target.name)
        if name != target.name:
            raise bad_request(
                f"the name of the object ({name}) does not match the name on the URL "
                f"({target.name})"
            )
        return self._update(target, before, body)

    def patch(self, target: Target, patch: Any, content_type: str, strict: bool) -> Object:
        before = self.get(target)
        body = self._decoded(target.resource, patched(before, patch, content_type), strict)
        return self._update(target, before, body)

    def _update(self, target: Target, before: Object, body: Object) -> Object:
        resource, old, new = target.resource, before["metadata"], body["metadata"]
        version = new.get("resourceVersion")
        if version and version != old["resourceVersion"]:
            raise object_modified(resource.qualified, target.name)
        if new.get("uid", old["uid"]) != old["uid"]:
            raise conflict(
                resource.qualified,
                target.name,
                f"Precondition failed: UID in precondition: {new['uid']}, "
                f"UID in object meta: {old['uid']}",
            )
        for field in _KEPT_METADATA:
            new.pop(field, None)
            if field in old:
                new[field] = old[field]
        after = self._merged_parts(target, before, body)
        causes = list(metadata_causes(resource.kind, after["metadata"]))
        if causes:
            raise invalid(resource.kind, target.name, causes)
        after = self.store.replace(resource, after)
        return self.store.remove(resource, after) if deletion.is_due(after) else after

    def _merged_parts(self, target: Target, before: Object, body: Object) -> Object:
        """The old object with what this endpoint may write of the new one."""
        resource = target.resource
        if target.subresource == "status":
            metadata = {**body["metadata"]}
            metadata["ownerReferences"] = before["metadata"].get("ownerReferences", [])
            if not metadata["ownerReferences"]:
                del metadata["ownerReferences"]
            return {**before, "metadata": metadata, "status": body.get("status", {})}
        if target.subresource == "finalize":
            return {**before, "spec": body.get("spec", {})}
        after = copy.deepcopy(body)
        if resource.has_status:
            status = before.get("status", {})
            set_defaults(resource.kind, after)
            after["status"] = status
        elif resource.kind == "Secret":
            set_defaults("Secret", after)
        if resource.kind == "Pod":
            check_pod_update(before, after)
            if after["spec"] != before["spec"]:
                after["metadata"]["generation"] += 1
        if before.get("immutable") and after.get("data") != before.get("data"):
            message = "Forbidden: field is immutable when `immutable` is set"
            raise invalid(
                resource.kind, target.name, [Cause("data", "FieldValueForbidden", message)]
            )
        return after

    def delete(self, target: Target, options: Object) -> tuple[Object, bool]:
        """Delete one object; return its last version, and whether it is gone."""
        before = self.get(target)
        if options.get("propagationPolicy") == "Orphan" or options.get("orphanDependents"):
            uid = before["metadata"]["uid"]
            self._orphan(uid)
        body, gone = deletion.delete(self.store, target.resource, before, options)
        if gone and target.resource.kind == "Namespace":
            self._empty(target.name)
        return body, gone

    def _orphan(self, uid: str) -> None:
        """Take the owner out of its dependents, as the garbage collector does before it goes."""
        for resource in RESOURCES.values():
            for each in self.store.items(resource):
                owners = each["metadata"].get("ownerReferences", [])
                kept = [owner for owner in owners if owner["uid"] != uid]
                if kept != owners:
                    metadata = {**each["metadata"], "ownerReferences": kept}
                    self.store.replace(resource, {**each, "metadata": metadata})

    def _empty(self, namespace: str) -> None:
        """What the namespace controller does; here at once."""
        for resource in RESOURCES.values():
            if resource.namespaced:
                for each in self.store.items(resource, namespace):
                    self.store.remove(resource, each)

    def delete_all(self, target: Target, match: Match, options: Object) -> Object:
        """Delete what matches; return the list of it."""
        listed = self.listed(target, match, 0, "")
        for each in listed["items"]:
            metadata = each["metadata"]
            one = Target(target.resource, metadata.get("namespace", ""), metadata["name"])
            self.delete(one, options)
        return listed

    def bind(self, target: Target, body: Object) -> Object:
        """Put a pod on a node.

        Raises:
            ApiError: 404, no such pod; 409, it has a node or is being deleted.
        """
        pod, node = self.get(target), body.get("target", {}).get("name", "")
        name, why = target.name, ""
        if not node:
            causes = [Cause("target.name", "FieldValueRequired", "Required value")]
            raise invalid("Binding", name, causes)
        if "deletionTimestamp" in pod["metadata"]:
            why = f"pod {name} is being deleted, cannot be assigned to a host"
        elif pod["spec"].get("nodeName"):
            why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        if why:
            raise conflict("pods/binding", name, why)
        conditions = [
            each for each in pod["status"].get("conditions", []) if each["type"] != "PodScheduled"
        ]
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        conditions.append({**scheduled, "lastTransitionTime": now_text()})
        spec = {**pod["spec"], "nodeName": node}
        status = {**pod["status"], "conditions": conditions}
        self.store.replace(target.resource, {**pod, "spec": spec, "status": status})
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "code": 201,
        }
