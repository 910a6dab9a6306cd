"""The API's objects in memory, with the history that watches read.

Everything runs in the API server's event loop, so that nothing needs a lock. A stored object is
never changed in place: whoever changes one stores another.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterator
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
    group: str = ""
    has_status: bool = False
    short: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def qualified(self) -> str:
        """The name in messages: with its group, if it has one."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RESOURCES = {
    each.plural: each
    for each in (
        Resource("configmaps", "ConfigMap", short="cm"),
        Resource("events", "Event", short="ev"),
        Resource("namespaces", "Namespace", namespaced=False, has_status=True, short="ns"),
        Resource("nodes", "Node", namespaced=False, has_status=True, short="no"),
        Resource("pods", "Pod", has_status=True, short="po"),
        Resource("priorityclasses", "PriorityClass", False, "scheduling.k8s.io", short="pc"),
        Resource("resourcequotas", "ResourceQuota", has_status=True, short="quota"),
        Resource("secrets", "Secret"),
        Resource("serviceaccounts", "ServiceAccount", short="sa"),
    )
}


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


class Store:
    """Objects by resource, namespace and name; each change has a revision of its own."""

    def __init__(self) -> None:
        self.revision = 1
        self.oldest_revision = 1  # watches from before it are too old
        self._objects: dict[str, dict[tuple[str, str], Object]] = {r: {} for r in RESOURCES}
        self._history: list[Change] = []
        self._waiting: set[asyncio.Event] = set()

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return self._objects[resource.plural].get((namespace, name))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object itself, not a copy.

        Raises:
            ApiError: 404.
        """
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource.qualified, name)
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
        metadata = body["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        if key in self._objects[resource.plural]:
            raise already_exists(resource.qualified, metadata["name"])
        metadata = {**metadata, "uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
        return self._write(resource, {**body, "metadata": metadata}, "ADDED", None)

    def replace(self, resource: Resource, body: Object) -> Object:
        """Store the next version of an object; nothing happens if it is the same."""
        key = (body["metadata"].get("namespace", ""), body["metadata"]["name"])
        before = self._objects[resource.plural][key]
        version = before["metadata"]["resourceVersion"]
        if {**body, "metadata": {**body["metadata"], "resourceVersion": version}} == before:
            return before
        return self._write(resource, body, "MODIFIED", before)

    def remove(self, resource: Resource, body: Object) -> Object:
        """Take an object away, and return its last version."""
        key = (body["metadata"].get("namespace", ""), body["metadata"]["name"])
        before = self._objects[resource.plural].pop(key)
        return self._record(resource, body, "DELETED", before)

    def _write(self, resource: Resource, body: Object, kind: str, before: Object | None) -> Object:
        after = self._record(resource, copy.deepcopy(body), kind, before)
        key = (after["metadata"].get("namespace", ""), after["metadata"]["name"])
        self._objects[resource.plural][key] = after
        return after

    def _record(self, resource: Resource, body: Object, kind: str, before: Object | None) -> Object:
        self.revision += 1
        after = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.revision)}}
        self._history.append(Change(self.revision, resource.plural, kind, after, before))
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

    def changes_since(self, revision: int) -> Iterator[Change]:
        """The history after `revision`, oldest first."""
        low, high = 0, len(self._history)
        while low < high:
            middle = (low + high) // 2
            if self._history[middle].revision <= revision:
                low = middle + 1
            else:
                high = middle
        yield from self._history[low:]

    def subscribe(self) -> asyncio.Event:
        """An event that is set at each change, until it is given to `unsubscribe`."""
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._waiting.discard(event)
