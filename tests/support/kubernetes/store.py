"""The objects of the API server's double, and what each verb does to them."""

import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from support.kubernetes.admission import admit, check_update
from support.kubernetes.objects import (
    RESOURCES,
    ApiError,
    Object,
    Resource,
    conflict,
    has_ended,
    is_being_deleted,
    not_found,
    now_text,
    with_condition,
)

_HISTORY = 10_000
_MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the history."""

    revision: int
    plural: str
    type: str
    body: Object


class Store:
    """Objects by resource, namespace and name; each change has a revision of its own.

    A stored object is never changed in place. `changed` is the lock of all of it, and is notified
    of every change; methods that are called in parallel hold it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.revision = 1
        self._objects: dict[str, dict[tuple[str, str], Object]] = {name: {} for name in RESOURCES}
        self._history: list[Change] = []
        self._is_closed = False

    def close(self) -> None:
        """End all watches."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._objects[plural].get((namespace, name))

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """The object itself, not a copy.

        Raises:
            ApiError: 404.
        """
        found = self.find(plural, namespace, name)
        if found is None:
            raise not_found(RESOURCES[plural].qualified, name)
        return found

    def items(self, plural: str, namespace: str = "") -> list[Object]:
        """All objects, or one namespace's, ordered by name."""
        found = self._objects[plural]
        return [found[key] for key in sorted(found) if not namespace or key[0] == namespace]

    def create(self, plural: str, namespace: str, body: Object) -> Object:
        """Complete, check and store a new object, which is changed.

        Raises:
            ApiError: 403, 404, 409 or 422.
        """
        resource, metadata = RESOURCES[plural], body.setdefault("metadata", {})
        body |= {"apiVersion": resource.version, "kind": resource.kind}
        with self.changed:
            if resource.namespaced:
                self.get("namespaces", "", namespace)
                metadata["namespace"] = namespace
            admit(body, self.items)
            name = metadata["name"]
            if self.find(plural, namespace, name) is not None:
                raise ApiError(
                    409, "AlreadyExists", f'{resource.qualified} "{name}" already exists'
                )
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
            return self._record(resource, body, "ADDED")

    def patch(
        self, plural: str, namespace: str, name: str, patch: Object, subresource: str = ""
    ) -> Object:
        """Merge into an object; `status` into its status only, and nothing else into that.

        Raises:
            ApiError: 404; 409, the patch names another version; 422.
        """
        with self.changed:
            before = self.get(plural, namespace, name)
            version = before["metadata"]["resourceVersion"]
            if patch.get("metadata", {}).get("resourceVersion", version) != version:
                raise conflict(RESOURCES[plural].qualified, name, _MODIFIED)
            after = _merged(before, patch)
            if subresource == "status":
                after = {**before, "status": after["status"]}
            elif "status" in before:
                after["status"] = before["status"]
            check_update(before, after)
            return self._settle(RESOURCES[plural], before, after)

    def set_status(self, plural: str, body: Object, status: Object) -> Object:
        """Replace the status of an object that is there."""
        with self.changed:
            before = self.get(
                plural, body["metadata"].get("namespace", ""), body["metadata"]["name"]
            )
            return self._settle(RESOURCES[plural], before, {**before, "status": status})

    def delete(self, plural: str, namespace: str, name: str, options: Object) -> Object:
        """Delete an object and what is in it, or mark it; return its last version.

        Raises:
            ApiError: 404; 409, `options.preconditions` aren't met.
        """
        resource = RESOURCES[plural]
        with self.changed:
            before = self.get(plural, namespace, name)
            metadata = {**before["metadata"]}
            _check_preconditions(resource, metadata, options.get("preconditions") or {})
            if plural == "namespaces":
                for inner in RESOURCES.values():
                    for body in self.items(inner.plural, name):
                        self._record(inner, body, "DELETED")
            asked = options.get("gracePeriodSeconds")
            grace_s = _grace_s(before, asked)
            if is_being_deleted(before):
                if asked is None or grace_s >= metadata["deletionGracePeriodSeconds"]:
                    return before
            elif options.get("propagationPolicy") == "Foreground":
                metadata["finalizers"] = [*metadata.get("finalizers", []), "foregroundDeletion"]
            ends = datetime.now(UTC) + timedelta(seconds=grace_s)
            metadata["deletionTimestamp"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata["deletionGracePeriodSeconds"] = grace_s
            return self._settle(resource, before, {**before, "metadata": metadata})

    def release(self, plural: str, body: Object, finalizer: str) -> None:
        """Take a finalizer away; an object that nothing else keeps goes."""
        metadata = body["metadata"]
        left = [name for name in metadata.get("finalizers", []) if name != finalizer]
        namespace = metadata.get("namespace", "")
        self.patch(plural, namespace, metadata["name"], {"metadata": {"finalizers": left}})

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Put a pod on a node.

        Raises:
            ApiError: 404, no such pod; 409, it has a node or is being deleted.
        """
        with self.changed:
            pod = self.get("pods", namespace, name)
            if pod["spec"].get("nodeName") or is_being_deleted(pod):
                raise conflict("pods/binding", name, "it has a node, or is being deleted")
            status = with_condition(pod["status"], "PodScheduled")
            spec = {**pod["spec"], "nodeName": node}
            self._record(RESOURCES["pods"], {**pod, "spec": spec, "status": status}, "MODIFIED")

    def changes(
        self, plural: str, namespace: str, revision: int, limit_s: float
    ) -> Iterator[Change | None]:
        """The history of a resource after a revision, as it goes on; None if it is too long ago."""
        until = time.monotonic() + limit_s
        while (left_s := until - time.monotonic()) > 0 and not self._is_closed:
            with self.changed:
                if self._history and revision < self._history[0].revision - 1:
                    yield None
                    return
                at = bisect_right(self._history, revision, key=lambda change: change.revision)
                fresh = self._history[at:]
                if not fresh:
                    self.changed.wait(left_s)
            for change in fresh:
                revision = change.revision
                where = change.body["metadata"].get("namespace", "")
                if change.plural == plural and where == (namespace or where):
                    yield change

    def _settle(self, resource: Resource, before: Object, after: Object) -> Object:
        """Store the next version, unless it is the same or nothing keeps what is being deleted."""
        metadata = after["metadata"]
        version = {"resourceVersion": before["metadata"]["resourceVersion"]}
        if {**after, "metadata": metadata | version} == before:
            return before
        keeps = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        goes = is_being_deleted(after) and not keeps
        return self._record(resource, after, "DELETED" if goes else "MODIFIED")

    def _record(self, resource: Resource, body: Object, kind: str) -> Object:
        self.revision += 1
        metadata = body["metadata"] | {"resourceVersion": str(self.revision)}
        after = {**body, "metadata": metadata}
        objects, key = (
            self._objects[resource.plural],
            (metadata.get("namespace", ""), metadata["name"]),
        )
        if kind == "DELETED":
            del objects[key]
        else:
            objects[key] = after
        self._history.append(Change(self.revision, resource.plural, kind, after))
        if len(self._history) > _HISTORY:
            del self._history[: _HISTORY // 2]
        self.changed.notify_all()
        return after


def _grace_s(body: Object, asked: int | None) -> int:
    """Seconds that a pod gets; 0 for other objects, and for a pod that runs nowhere."""
    if body["kind"] != "Pod" or not body["spec"].get("nodeName") or has_ended(body):
        return 0
    return int(body["spec"]["terminationGracePeriodSeconds"] if asked is None else asked)


def _check_preconditions(resource: Resource, metadata: Object, wanted: Object) -> None:
    for field, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(field) not in (None, metadata[field]):
            why = f"the {label} in the precondition ({wanted[field]}) does not match the {label}"
            found = f"in record ({metadata[field]})"
            raise conflict(resource.kind, metadata["name"], f"{why} {found}")


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
