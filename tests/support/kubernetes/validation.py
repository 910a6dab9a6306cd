"""The API server's rules for objects: names, labels, pods, and what of a pod may change."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from support.kubernetes.quantities import PATTERN, quantity, text_of
from support.kubernetes.status import Cause, Object, bad_request, invalid

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{_SUBDOMAIN}')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used "
    f"for validation is '{_LABEL}')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', "
    "and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or "
    f"'12345', regex used for validation is '{_VALUE}')"
)
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
    f"validation is '{_QUALIFIED}')"
)
_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_IMMUTABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)
_QUANTITY_RULE = (
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value{': ' if why else ''}{why}")


def _invalid(field: str, value: Any, why: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {why}")


def _unsupported(field: str, value: Any, *supported: str) -> Cause:
    listed = ", ".join(f'"{each}"' for each in supported)
    message = f"Unsupported value: {json.dumps(value)}: supported values: {listed}"
    return Cause(field, "FieldValueNotSupported", message)


def _duplicate(field: str, value: Any) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {json.dumps(value)}")


def check(kind: str, body: Object) -> None:
    """Check a new object.

    Raises:
        ApiError: 422, with every rule that it breaks.
    """
    causes = [*metadata_causes(kind, body["metadata"])]
    if kind == "Pod":
        causes += pod_causes(body["spec"])
    if causes:
        raise invalid(kind, body["metadata"].get("name", ""), causes)


def metadata_causes(kind: str, metadata: Mapping[str, Any]) -> Iterator[Cause]:
    """Rules for names, labels and annotations."""
    name = metadata.get("name", "")
    if not name:
        yield _required("metadata.name", "name or generateName is required")
    elif kind == "Namespace":
        if not re.fullmatch(_LABEL, name) or len(name) > 63:
            yield _invalid("metadata.name", name, _LABEL_RULE)
    elif len(name) > 253:
        yield _invalid("metadata.name", name, "must be no more than 253 bytes")
    elif not re.fullmatch(_SUBDOMAIN, name):
        yield _invalid("metadata.name", name, _SUBDOMAIN_RULE)
    for key, value in metadata.get("labels", {}).items():
        yield from _key_causes("metadata.labels", key)
        if len(value) > 63:
            yield _invalid("metadata.labels", value, "must be no more than 63 bytes")
        elif not re.fullmatch(_VALUE, value):
            yield _invalid("metadata.labels", value, _VALUE_RULE)
    for key in metadata.get("annotations", {}):
        yield from _key_causes("metadata.annotations", key.lower())


def _key_causes(field: str, key: str) -> Iterator[Cause]:
    prefix, _, name = key.rpartition("/")
    if prefix and not re.fullmatch(_SUBDOMAIN, prefix):
        yield _invalid(field, key, f"prefix part {_SUBDOMAIN_RULE}")
    if not name:
        yield _invalid(field, key, "name part must be non-empty")
    elif len(name) > 63:
        yield _invalid(field, key, "name part must be no more than 63 bytes")
    elif not re.fullmatch(_QUALIFIED, name):
        yield _invalid(field, key, _KEY_RULE)


def pod_causes(spec: Mapping[str, Any]) -> Iterator[Cause]:
    """Rules for a pod's spec, with its defaults filled in."""
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        supported = ("Always", "OnFailure", "Never")
        yield _unsupported("spec.restartPolicy", spec["restartPolicy"], *supported)
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= 2**31 - 1:
        why = "must be between 1 and 2147483647, inclusive"
        yield _invalid("spec.activeDeadlineSeconds", deadline, why)
    volumes: set[str] = set()
    for at, volume in enumerate(spec.get("volumes", [])):
        yield from _volume_causes(f"spec.volumes[{at}]", volume, volumes)
    if not spec.get("containers"):
        yield _required("spec.containers")
    names: set[str] = set()
    for group in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(group, [])):
            yield from _container_causes(f"spec.{group}[{at}]", container, names, volumes)


def _volume_causes(field: str, volume: Mapping[str, Any], names: set[str]) -> Iterator[Cause]:
    name = volume.get("name", "")
    if not name:
        yield _required(f"{field}.name")
    elif not re.fullmatch(_LABEL, name) or len(name) > 63:
        yield _invalid(f"{field}.name", name, _LABEL_RULE)
    elif name in names:
        yield _duplicate(f"{field}.name", name)
    names.add(name)
    if len(volume) > 2:
        message = "may not specify more than 1 volume type"
        yield Cause(field, "FieldValueForbidden", f"Forbidden: {message}")


def _container_causes(
    field: str, container: Mapping[str, Any], names: set[str], volumes: set[str]
) -> Iterator[Cause]:
    name = container.get("name", "")
    if not name:
        yield _required(f"{field}.name")
    elif not re.fullmatch(_LABEL, name) or len(name) > 63:
        yield _invalid(f"{field}.name", name, _LABEL_RULE)
    elif name in names:
        yield _duplicate(f"{field}.name", name)
    names.add(name)
    image = container.get("image", "")
    if not image:
        yield _required(f"{field}.image")
    elif image != image.strip():
        yield _invalid(f"{field}.image", image, "must not have leading or trailing whitespace")
    if container["imagePullPolicy"] not in ("Always", "IfNotPresent", "Never"):
        supported = ("Always", "IfNotPresent", "Never")
        policy = container["imagePullPolicy"]
        yield _unsupported(f"{field}.imagePullPolicy", policy, *supported)
    if container["terminationMessagePolicy"] not in ("File", "FallbackToLogsOnError"):
        policy = container["terminationMessagePolicy"]
        where = f"{field}.terminationMessagePolicy"
        yield _unsupported(where, policy, "FallbackToLogsOnError", "File")
    yield from _env_causes(field, container)
    yield from _resource_causes(f"{field}.resources", container["resources"])
    paths: set[str] = set()
    for at, mount in enumerate(container.get("volumeMounts", [])):
        below = f"{field}.volumeMounts[{at}]"
        if mount.get("name") not in volumes:
            found = f"Not found: {json.dumps(mount.get('name', ''))}"
            yield Cause(f"{below}.name", "FieldValueNotFound", found)
        if not mount.get("mountPath"):
            yield _required(f"{below}.mountPath")
        elif mount["mountPath"] in paths:
            yield _invalid(f"{below}.mountPath", mount["mountPath"], "must be unique")
        paths.add(mount.get("mountPath", ""))


def _env_causes(field: str, container: Mapping[str, Any]) -> Iterator[Cause]:
    for at, variable in enumerate(container.get("env", [])):
        below, name = f"{field}.env[{at}]", variable.get("name", "")
        if not name:
            yield _required(f"{below}.name")
        elif "=" in name or not name.isascii() or not name.isprintable():
            rule = "a valid environment variable name must consist only of printable ASCII "
            yield _invalid(f"{below}.name", name, f"{rule}characters other than '='")
        if variable.get("value") and variable.get("valueFrom"):
            why = "may not be specified when `value` is not empty"
            yield _invalid(f"{below}.valueFrom", "", why)


def _resource_causes(field: str, resources: Mapping[str, Any]) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for which, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            standard = name in _STANDARD_RESOURCES or name.startswith("hugepages-")
            if not standard and "/" not in name:
                why = "must be a standard resource type or fully qualified"
                yield _invalid(f"{field}.{which}", name, why)
            if quantity(amount) < 0:
                why = "must be greater than or equal to 0"
                yield _invalid(f"{field}.{which}[{name}]", amount, why)
            elif "/" in name and quantity(amount) % 1:
                yield _invalid(f"{field}.{which}[{name}]", amount, "must be an integer")
    for name, amount in requests.items():
        limit, extended = limits.get(name), "/" in name or name.startswith("hugepages-")
        if limit is None and extended:
            why = "Limit must be set for non overcommitable resources"
            yield _required(f"{field}.limits", why)
        elif limit is not None and extended and quantity(amount) != quantity(limit):
            why = f"must be equal to {name} limit of {limit}"
            yield _invalid(f"{field}.requests", amount, why)
        elif limit is not None and quantity(amount) > quantity(limit):
            why = f"must be less than or equal to {name} limit of {limit}"
            yield _invalid(f"{field}.requests", amount, why)


def normalise_quantities(kind: str, body: Object) -> None:
    """Make texts of a pod's amounts that were given as numbers, in place.

    Raises:
        ApiError: 400, an amount isn't one: a real server fails while it decodes the object.
    """
    spec = body.get("spec", {})
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        for amounts in container.get("resources", {}).values():
            if not isinstance(amounts, dict):
                continue
            for name, amount in amounts.items():
                if not PATTERN.match(str(amount)):
                    raise bad_request(
                        f'{kind} in version "v1" cannot be handled as a {kind}: {_QUANTITY_RULE}'
                    )
                amounts[name] = (
                    str(amount) if isinstance(amount, str) else text_of(quantity(amount))
                )


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
        why = f"must be less than or equal to previous value: {limit}"
        raise invalid("Pod", name, [_invalid("spec.activeDeadlineSeconds", deadline, why)])
