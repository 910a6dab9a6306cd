"""The controllers of the double: of Jobs, of what belongs to others, and of pods without a node.

They work on the store itself, one after another, whenever it has changed.
"""

import threading

from support.kubernetes.job_controller import JobController
from support.kubernetes.objects import (
    RESOURCES,
    Object,
    has_ended,
    is_being_deleted,
    with_condition,
)
from support.kubernetes.scheduler import schedule
from support.kubernetes.store import Store

_PERIOD_S = 0.2  # for what time brings about: deadlines, quotas that have room again
_FOREGROUND = "foregroundDeletion"
_PLURALS = {resource.kind: resource.plural for resource in RESOURCES.values()}


class Controllers:
    """Work from construction until `close`."""

    def __init__(self, store: Store) -> None:
        self._store, self._jobs = store, JobController(store)
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; raise what went wrong inside."""
        self._is_closed = True
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        store = self._store
        try:
            while not self._is_closed:
                with store.changed:
                    before = store.revision
                    collect_garbage(store)
                    self._jobs.sync()
                    schedule(store)
                    if store.revision == before:
                        store.changed.wait(_PERIOD_S)
        except BaseException as error:
            self._failure = error
            raise


def collect_garbage(store: Store) -> None:
    """Remove objects whose owners are gone or going, and pods that no kubelet will ever end."""
    owned = [
        body
        for plural in RESOURCES
        for body in store.items(plural)
        if body["metadata"].get("ownerReferences")
    ]
    blocked: set[str] = set()
    for body in owned:
        owners = [
            _owner(store, body, reference) for reference in body["metadata"]["ownerReferences"]
        ]
        going = [
            owner
            for owner in owners
            if owner and _FOREGROUND in owner["metadata"].get("finalizers", [])
        ]
        if going or not any(owners):
            blocked.update(owner["metadata"]["uid"] for owner in going)
            if not is_being_deleted(body):
                _delete(store, body)
    for plural in RESOURCES:
        for body in store.items(plural):
            metadata = body["metadata"]
            if _FOREGROUND in metadata.get("finalizers", []) and metadata["uid"] not in blocked:
                store.release(plural, body, _FOREGROUND)
    for pod in store.items("pods"):
        node = pod["spec"].get("nodeName")
        if has_ended(pod) or not (is_being_deleted(pod) if not node else _is_lost(store, node)):
            continue
        why = {"reason": "DeletionByPodGC", "message": "PodGC: node no longer exists"}
        status = with_condition(pod["status"], "DisruptionTarget", **why) if node else pod["status"]
        store.set_status("pods", pod, {**status, "phase": "Failed"})
        _delete(store, pod, gracePeriodSeconds=0)


def _is_lost(store: Store, node: str) -> bool:
    return store.find("nodes", "", node) is None


def _owner(store: Store, body: Object, reference: Object) -> Object | None:
    plural = _PLURALS.get(reference["kind"])
    if plural is None:  # of a kind that isn't known here: taken to be there
        return {"metadata": {}}
    owner = store.find(plural, body["metadata"]["namespace"], reference["name"])
    return owner if owner and owner["metadata"]["uid"] == reference["uid"] else None


def _delete(store: Store, body: Object, **options: int) -> None:
    metadata, plural = body["metadata"], _PLURALS[body["kind"]]
    if store.find(plural, metadata["namespace"], metadata["name"]) is not None:
        store.delete(plural, metadata["namespace"], metadata["name"], dict(options))
