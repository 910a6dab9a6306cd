"""The API's objects in memory, with the history that watches read.

Everything runs in the API server's event loop, so that nothing needs a lock. A stored object is
never changed in place: a change stores another.
"""

from __future__ import annotations

import asyncio
import uuid
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime

from support.kubernetes.status import Object, already_exists, not_found

HISTORY_LENGTH = 10_000


@dataclass(frozen=True, slots=True)
class Resource:
    """A type of object that the API has."""

    plural: str
    kind: str
    namespaced: bool = True
    version: str = "v1"


RESOURCES = {
    each.plural: each
    for each in (
        Resource("configmaps", "ConfigMap"),
        Resource("events", "Event"),
        Resource("jobs", "Job", version="batch/v1"),
        Resource("namespaces", "Namespace", namespaced=False),
        Resource("nodes", "Node", namespaced=False),
        Resource("pods", "Pod"),
        Resource("resourcequotas", "ResourceQuota"),
        Resource("secrets", "Secret"),
    )
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is about; an empty name means all objects."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of the history: `before` is None for a new object."""

    revision: int
    resource: str
    type: str
    after: Object
    before: Object | None


def now_text() -> str:
    """The time as the API writes it: whole seconds, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _key(body: Object) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


class Store:
    """Objects by resource, namespace and name; each change has a revision of its own."""

    def __init__(self) -> None:
        self.revision = 1
        self.oldest_revision = 1  # watches from before it are too old
        self._objects: dict[str, dict[tuple[str, str], Object]] = {r: {} for r in RESOURCES}
        self._history: list[Change] = []
        self._waiting: set[asyncio.Event] = set()

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object itself, not a copy.

        Raises:
            ApiError: 404.
        """
        found = self._objects[resource.plural].get((namespace, name))
        if found is None:
            raise not_found(resource.plural, name)
        return found

    def items(self, resource: Resource, namespace: str = "") -> list[Object]:
        """All objects, or one namespace's, ordered by name."""
        found = self._objects[resource.plural]
        return [found[key] for key in sorted(found) if not namespace or key[0] == namespace]

    def create(self, resource: Resource, body: Object) -> Object:
        """Store a new object, with its uid, time and revision.

        Raises:
            ApiError: 409, there is one of this name.
        """
        if _key(body) in self._objects[resource.plural]:
            raise already_exists(resource.plural, body["metadata"]["name"])
        own = {"uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
        return self._record(resource, {**body, "metadata": body["metadata"] | own}, "ADDED")

    def replace(self, resource: Resource, body: Object) -> Object:
        """Store the next version of an object; nothing happens if it is the same."""
        before = self._objects[resource.plural][_key(body)]
        version = {"resourceVersion": before["metadata"]["resourceVersion"]}
        if {**body, "metadata": body["metadata"] | version} == before:
            return before
        return self._record(resource, body, "MODIFIED")

    def remove(self, resource: Resource, body: Object) -> Object:
        """Take an object away, and return its last version."""
        return self._record(resource, body, "DELETED")

    def _record(self, resource: Resource, body: Object, kind: str) -> Object:
        self.revision += 1
        version = {"resourceVersion": str(self.revision)}
        after = {**body, "metadata": body["metadata"] | version}
        objects, key = self._objects[resource.plural], _key(body)
        change = Change(self.revision, resource.plural, kind, after, objects.pop(key, None))
        if kind != "DELETED":
            objects[key] = after
        self._history.append(change)
        if len(self._history) > HISTORY_LENGTH:
            self.forget_history(HISTORY_LENGTH // 2)
        for event in self._waiting:
            event.set()
        return after

    def forget_history(self, keep: int = 0) -> None:
        """What etcd's compaction does: watches from before it end with 410."""
        dropped = self._history[: len(self._history) - keep]
        if dropped:
            self._history = self._history[len(dropped) :]
            self.oldest_revision = dropped[-1].revision

    def changes_since(self, revision: int) -> list[Change]:
        """The history after `revision`, oldest first."""
        at = bisect_right(self._history, revision, key=lambda each: each.revision)
        return self._history[at:]

    def subscribe(self) -> asyncio.Event:
        """An event that is set at each change, until it is given to `unsubscribe`."""
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._waiting.discard(event)
