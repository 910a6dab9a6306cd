"""What a delete does to an object: gone at once, or marked for the one that has to finish it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.kubernetes.status import Object, conflict
from support.kubernetes.store import Resource, Store

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def delete(store: Store, resource: Resource, body: Object, options: Object) -> Object:
    """Delete an object, or mark it; return its last version.

    A pod is marked first even if it goes at once, so that watches see it MODIFIED, then DELETED.

    Raises:
        ApiError: 409, `options.preconditions` aren't met.
    """
    _check_preconditions(resource, body, options.get("preconditions") or {})
    asked, metadata = options.get("gracePeriodSeconds"), body["metadata"]
    period = _grace_period(resource, body, asked)
    if "deletionTimestamp" in metadata:
        left = metadata["deletionGracePeriodSeconds"]
        if asked is None or period >= left:
            return body
        ends = datetime.strptime(metadata["deletionTimestamp"], _FORMAT).replace(tzinfo=UTC)
        ends = max(ends + timedelta(seconds=period - left), datetime.now(UTC))
    else:
        ends = datetime.now(UTC) + timedelta(seconds=period)
    if options.get("propagationPolicy") == "Foreground" and resource.kind == "Job":
        metadata = {**metadata, "finalizers": ["foregroundDeletion"]}  # until its pods are gone
    goes = period == 0 and not metadata.get("finalizers")
    if goes and resource.kind != "Pod":
        return store.remove(resource, body)
    marks = {"deletionTimestamp": ends.strftime(_FORMAT), "deletionGracePeriodSeconds": period}
    after = store.replace(resource, {**body, "metadata": metadata | marks})
    return store.remove(resource, after) if goes else after


def _grace_period(resource: Resource, body: Object, asked: int | None) -> int:
    """Seconds that a pod gets; 0 for other objects, and for a pod that runs nowhere."""
    if resource.kind != "Pod":
        return 0
    spec, phase = body["spec"], body["status"].get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    return int(spec["terminationGracePeriodSeconds"] if asked is None else asked)


def _check_preconditions(resource: Resource, body: Object, wanted: dict[str, Any]) -> None:
    metadata = body["metadata"]
    for field, label, since in (
        ("uid", "UID", "deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "modified"),
    ):
        if wanted.get(field) is not None and wanted[field] != metadata[field]:
            raise conflict(  # the one conflict that names the kind
                resource.kind,
                metadata["name"],
                f"the {label} in the precondition ({wanted[field]}) does not match the {label} in "
                f"record ({metadata[field]}). The object might have been {since}",
            )


def is_due(body: Object) -> bool:
    """Whether a marked object has nothing left that keeps it."""
    metadata = body["metadata"]
    waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return "deletionTimestamp" in metadata and not waits
