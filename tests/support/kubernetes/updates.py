"""What of an object may change, and when an update is meant for another one."""

from __future__ import annotations

import copy
import json

from support.kubernetes.status import Cause, Object, conflict, invalid
from support.kubernetes.store import Resource
from support.kubernetes.validation import invalid_value, metadata_causes

_IMMUTABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)


def check_update(kind: str, before: Object, after: Object) -> None:
    """Check the metadata of an object's new version, and what never changes of its kind.

    Raises:
        ApiError: 422.
    """
    old, new = before["metadata"], after["metadata"]
    causes = list(metadata_causes(kind, new))
    added = [each for each in new.get("finalizers") or [] if each not in old.get("finalizers", [])]
    if "deletionTimestamp" in old and added:
        listed = ", ".join(json.dumps(each) for each in added)
        message = (
            "Forbidden: no new finalizers can be added if the object is being deleted, found new "
            f"finalizers []string{{{listed}}}"
        )
        causes.append(Cause("metadata.finalizers", "FieldValueForbidden", message))
    if kind == "Secret" and after.get("type") != before.get("type"):
        causes.append(invalid_value("type", after.get("type"), "field is immutable"))
    if before.get("immutable") and after.get("data") != before.get("data"):
        message = "Forbidden: field is immutable when `immutable` is set"
        causes.append(Cause("data", "FieldValueForbidden", message))
    if causes:
        raise invalid(kind, new["name"], causes)


def check_identity(resource: Resource, before: Object, given: Object, is_patch: bool) -> None:
    """Check that a new version is meant for the object that is there.

    Raises:
        ApiError: 409, or 422 for a patch: the uid is another object's.
    """
    old, kind = before["metadata"], resource.kind
    uid = given.get("uid", old["uid"])
    if uid == old["uid"]:
        return
    if is_patch:
        cause = invalid_value("metadata.uid", uid, "field is immutable")
        raise invalid(kind, old["name"], [cause] * (2 if kind == "Pod" else 1))
    key = "/".join(filter(None, ("", "registry", resource.plural, old.get("namespace"))))
    why = (
        f"StorageError: invalid object, Code: 4, Key: /{key}/{old['name']}, ResourceVersion: 0, "
        f"AdditionalErrorMsg: Precondition failed: UID in precondition: {uid}, "
        f"UID in object meta: {old['uid']}"
    )
    raise conflict(resource.qualified, old["name"], why)


def check_pod_update(before: Object, after: Object) -> None:
    """Check that a pod's new spec changes only what may change.

    Raises:
        ApiError: 422.
    """
    old, new = before["spec"], after["spec"]
    name = after["metadata"]["name"]
    if len(old["containers"]) != len(new.get("containers", [])):
        message = "Forbidden: pod updates may not add or remove containers"
        raise invalid("Pod", name, [Cause("spec.containers", "FieldValueForbidden", message)])
    allowed = copy.deepcopy(new)
    for group in ("containers", "initContainers"):
        for mine, theirs in zip(allowed.get(group, []), old.get(group, []), strict=False):
            mine["image"] = theirs["image"]
    for key in ("activeDeadlineSeconds", "tolerations"):
        allowed.pop(key, None)
        if key in old:
            allowed[key] = old[key]
    kept = all(each in new.get("tolerations", []) for each in old.get("tolerations", []))
    if allowed != old or not kept:
        message = f"Forbidden: {_IMMUTABLE}"
        raise invalid("Pod", name, [Cause("spec", "FieldValueForbidden", message)])
    deadline, limit = new.get("activeDeadlineSeconds"), old.get("activeDeadlineSeconds")
    if limit is not None and (deadline is None or deadline > limit):
        why = "must be less than or equal to previous value"
        raise invalid("Pod", name, [invalid_value("spec.activeDeadlineSeconds", deadline, why)])
