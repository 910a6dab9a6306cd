"""What a delete does to an object: gone at once, or marked for whoever has to finish it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.kubernetes.status import Object, conflict
from support.kubernetes.store import Resource, Store

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def delete(store: Store, resource: Resource, body: Object, options: Object) -> tuple[Object, bool]:
    """Delete an object; return its last version, and whether it is gone.

    Raises:
        ApiError: 409, `options.preconditions` aren't met.
    """
    _check_preconditions(resource, body, options.get("preconditions") or {})
    period = _grace_period(resource, body, options.get("gracePeriodSeconds"))
    metadata = body["metadata"]
    if "deletionTimestamp" in metadata:
        left = metadata["deletionGracePeriodSeconds"]
        if options.get("gracePeriodSeconds") is None or period >= left:
            return body, False
        ends = datetime.strptime(metadata["deletionTimestamp"], _FORMAT).replace(tzinfo=UTC)
        ends += timedelta(seconds=period - left)
    else:
        ends = datetime.now(UTC) + timedelta(seconds=period)
    if period == 0 and not metadata.get("finalizers"):
        return store.remove(resource, body), True
    marked = {
        **metadata,
        "deletionTimestamp": ends.strftime(_FORMAT),
        "deletionGracePeriodSeconds": period,
    }
    if "generation" in marked and "deletionTimestamp" not in metadata:
        marked["generation"] += 1
    return store.replace(resource, {**body, "metadata": marked}), False


def _grace_period(resource: Resource, body: Object, asked: int | None) -> int:
    """Seconds that a pod gets; nobody finishes other objects, nor a pod that runs nowhere."""
    if resource.plural != "pods":
        return 0
    spec, phase = body["spec"], body.get("status", {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    period = spec["terminationGracePeriodSeconds"] if asked is None else asked
    return 1 if period < 0 else int(period)


def _check_preconditions(resource: Resource, body: Object, wanted: dict[str, Any]) -> None:
    metadata = body["metadata"]
    for field, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(field) is not None and wanted[field] != metadata[field]:
            raise conflict(
                resource.plural,
                metadata["name"],
                f"Precondition failed: {label} in precondition: {wanted[field]}, "
                f"{label} in object meta: {metadata[field]}",
            )


def is_due(body: Object) -> bool:
    """Whether a marked object has nothing left that keeps it."""
    metadata = body["metadata"]
    waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return "deletionTimestamp" in metadata and not waits
