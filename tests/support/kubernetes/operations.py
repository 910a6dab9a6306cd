"""The API's verbs on the store, without HTTP: everything that a request can do to an object."""

from __future__ import annotations

import copy
import uuid
from typing import Any

from support.kubernetes import deletion
from support.kubernetes.admission import admit_pod, charge_quotas, taint_node
from support.kubernetes.defaults import generated_name, set_defaults
from support.kubernetes.listing import Match, Target, listed
from support.kubernetes.patches import patched
from support.kubernetes.schema import prune
from support.kubernetes.status import (
    ApiError,
    Cause,
    Object,
    bad_request,
    conflict,
    forbidden,
    invalid_options,
    object_modified,
)
from support.kubernetes.store import RESOURCES, Resource, Store, now_text
from support.kubernetes.updates import check_identity, check_pod_update, check_update
from support.kubernetes.validation import check, check_base64, normalise_quantities

_KEPT_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
    "name",
)


def check_dry_run(verb: str, asked: str) -> bool:
    """Whether a request is to change nothing.

    Raises:
        ApiError: 422, it asks for something else.
    """
    if asked in ("", "All"):
        return asked == "All"
    message = f'Unsupported value: ["{asked}"]: supported values: "All"'
    raise invalid_options(f"{verb}Options", Cause("dryRun", "FieldValueNotSupported", message))


def _check_name(target: Target, metadata: Object) -> None:
    name = metadata.get("name", target.name)
    if name != target.name:
        raise bad_request(
            f"the name of the object ({name}) does not match the name on the URL ({target.name})"
        )


def _is_terminating(target: Target, name: str) -> ApiError:
    message = f"namespace {target.namespace} is being terminated"
    cause = Cause("metadata.namespace", "NamespaceTerminating", message)
    why = (
        f"unable to create new content in namespace {target.namespace} because it is being "
        "terminated"
    )
    error = forbidden(target.resource.qualified, name, why)
    details = {**(error.details or {}), "causes": [cause.body()]}
    return ApiError(error.code, error.reason, error.message, details)


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
        elif kind == "Node":
            taint_node(body)
        check(kind, body)
        if kind == "Pod":
            charge_quotas(self.store, body, dry_run)
        if dry_run:
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
            return body
        stored = self.store.create(resource, body)
        if kind == "Namespace":
            self._furnish(metadata["name"])
        return stored

    def _decoded(self, resource: Resource, body: Object, strict: bool) -> Object:
        kind, version = resource.kind, resource.api_version
        given, stated = body.get("kind") or kind, body.get("apiVersion") or version
        if given != kind or stated != version:
            why = f"converting ({stated}.{given}) to (core.{kind}): unknown conversion"
            if stated != version:
                why = (
                    f'no kind "{given}" is registered for version "{stated}" in scheme '
                    '"k8s.io/kubernetes/pkg/api/legacyscheme/scheme.go:30"'
                )
            raise bad_request(f'{given} in version "{stated}" cannot be handled as a {kind}: {why}')
        body, unknown = prune(kind, body)
        if unknown and strict:
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise bad_request(
                f'{kind} in version "v1" cannot be handled as a {kind}: '
                f"strict decoding error: {listed}"
            )
        body["apiVersion"], body["kind"] = version, kind
        normalise_quantities(kind, body)
        if kind == "Secret":
            check_base64(body.get("data") or {})
        return body

    def _place(self, target: Target, metadata: Object) -> None:
        """Put the request's namespace into the object."""
        if not target.resource.namespaced:
            metadata.pop("namespace", None)
            return
        namespace = self.store.get(RESOURCES["namespaces"], "", target.namespace)
        if metadata.get("namespace", target.namespace) != target.namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        metadata["namespace"] = target.namespace
        if "deletionTimestamp" in namespace["metadata"]:
            raise _is_terminating(target, metadata.get("name", ""))

    def _furnish(self, namespace: str) -> None:
        """What controllers put into each new namespace."""
        account = Target(RESOURCES["serviceaccounts"], namespace)
        self.create(account, {"metadata": {"name": "default"}}, False, False)
        authority = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}
        self.create(Target(RESOURCES["configmaps"], namespace), authority, False, False)

    def get(self, target: Target) -> Object:
        return self.store.get(target.resource, target.namespace, target.name)

    def replace(self, target: Target, body: Object, strict: bool, dry_run: bool) -> Object:
        """PUT: the whole object, or the part that a subresource names."""
        body = self._decoded(target.resource, body, strict)
        _check_name(target, body.setdefault("metadata", {}))
        before = self.get(target)
        check_identity(target.resource, before, body["metadata"], is_patch=False)
        return self._update(target, before, body, dry_run)

    def patch(
        self, target: Target, patch: Any, content_type: str, strict: bool, dry_run: bool
    ) -> Object:
        before = self.get(target)
        body = self._decoded(target.resource, patched(before, patch, content_type), strict)
        _check_name(target, body["metadata"])
        version = body["metadata"].get("resourceVersion", "")
        if version in ("", before["metadata"]["resourceVersion"]):
            check_identity(target.resource, before, body["metadata"], is_patch=True)
        return self._update(target, before, body, dry_run)

    def _update(self, target: Target, before: Object, body: Object, dry_run: bool) -> Object:
        resource, old, new = target.resource, before["metadata"], body["metadata"]
        version = new.get("resourceVersion")
        if version and version != old["resourceVersion"]:
            raise object_modified(resource.qualified, target.name)
        for field in _KEPT_METADATA:
            new.pop(field, None)
            if field in old:
                new[field] = old[field]
        after = self._merged_parts(target, before, body)
        check_update(resource.kind, before, after)
        if dry_run:
            return after
        if not deletion.is_due(after):
            return self.store.replace(resource, after)
        if resource.kind == "Namespace":
            self._empty(target.name)
        return self.store.remove(resource, after)

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
        return after

    def delete(self, target: Target, options: Object) -> tuple[Object, bool]:
        """Delete one object; return its last version, and whether it is gone."""
        deletion.check_options(options)
        before = self.get(target)
        if options.get("dryRun"):
            return before, True
        if options.get("propagationPolicy") == "Orphan" or options.get("orphanDependents"):
            uid = before["metadata"]["uid"]
            self._orphan(uid)
        return deletion.delete(self.store, target.resource, before, options)

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
        """What the namespace controller does before it lets a namespace go."""
        for resource in RESOURCES.values():
            if resource.namespaced:
                for each in self.store.items(resource, namespace):
                    self.store.remove(resource, each)

    def delete_all(self, target: Target, match: Match, options: Object) -> Object:
        """Delete what matches; return the list of it."""
        found = listed(self.store, target, match, 0, "")
        for each in found["items"]:
            metadata = each["metadata"]
            one = Target(target.resource, metadata.get("namespace", ""), metadata["name"])
            self.delete(one, options)
        return found

    def bind(self, target: Target, body: Object) -> Object:
        """Put a pod on a node.

        Raises:
            ApiError: 404, no such pod; 409, it has a node or is being deleted.
        """
        pod, node = self.get(target), body.get("target", {}).get("name", "")
        name, why = target.name, ""
        if not node:
            raise ApiError(500, "", "target.name: Required value")
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
