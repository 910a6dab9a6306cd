"""What a delete does to an object: gone at once, or marked for whoever has to finish it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.kubernetes.status import Cause, Object, conflict, invalid_options
from support.kubernetes.store import Resource, Store

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def check_options(options: Object) -> None:
    """Check what a delete asks for.

    Raises:
        ApiError: 422.
    """
    policies = ("Foreground", "Background", "Orphan", "nil")
    policy = options.get("propagationPolicy")
    if policy is not None and policy not in policies[:3]:
        listed = ", ".join(f'"{each}"' for each in policies)
        message = f'Unsupported value: "{policy}": supported values: {listed}'
        cause = Cause("propagationPolicy", "FieldValueNotSupported", message)
        raise invalid_options("DeleteOptions", cause)


def delete(store: Store, resource: Resource, body: Object, options: Object) -> tuple[Object, bool]:
    """Delete an object; return its last version, and whether it is gone.

    A pod is marked first even if it goes at once, so that watches see it MODIFIED, then DELETED.

    Raises:
        ApiError: 409, `options.preconditions` aren't met.
    """
    _check_preconditions(resource, body, options.get("preconditions") or {})
    period = _grace_period(resource, body, options.get("gracePeriodSeconds"))
    metadata = body["metadata"]
    if "deletionTimestamp" in metadata:
        left = metadata.get("deletionGracePeriodSeconds", 0)
        if options.get("gracePeriodSeconds") is None or period >= left:
            return body, False
        ends = datetime.strptime(metadata["deletionTimestamp"], _FORMAT).replace(tzinfo=UTC)
        ends = max(ends + timedelta(seconds=period - left), datetime.now(UTC))
    else:
        ends = datetime.now(UTC) + timedelta(seconds=period)
    goes = period == 0 and not metadata.get("finalizers") and not _is_kept(body)
    if goes and resource.kind != "Pod":
        return store.remove(resource, body), True
    marked = {
        **metadata,
        "deletionTimestamp": ends.strftime(_FORMAT),
        "deletionGracePeriodSeconds": period,
    }
    if "generation" in marked and "deletionTimestamp" not in metadata:
        marked["generation"] += 1
    marked = {**body, "metadata": marked}
    if resource.kind == "Namespace":
        del marked["metadata"]["deletionGracePeriodSeconds"]
        marked["status"] = {**body.get("status", {}), "phase": "Terminating"}
    after = store.replace(resource, marked)
    return (store.remove(resource, after), True) if goes else (after, False)


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


def _is_kept(body: Object) -> bool:
    """Whether it is a namespace that a controller hasn't emptied."""
    return body["kind"] == "Namespace" and bool(body["spec"].get("finalizers"))


def is_due(body: Object) -> bool:
    """Whether a marked object has nothing left that keeps it."""
    metadata = body["metadata"]
    waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    waits = waits or _is_kept(body)
    return "deletionTimestamp" in metadata and not waits
