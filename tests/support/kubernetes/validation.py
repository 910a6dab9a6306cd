"""The API server's rules for objects: names, labels, pods, and what of a pod may change."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from support.kubernetes.quantities import PATTERN, canonical, quantity
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
_CONFIG_KEY = r"[-._a-zA-Z0-9]+"
_CONFIG_KEY_RULE = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name', "
    f" or 'KEY_NAME',  or 'key-name', regex used for validation is '{_CONFIG_KEY}')"
)
_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_QUANTITY_RULE = (
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value{': ' if why else ''}{why}")


def invalid_value(field: str, value: Any, why: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {why}")


def _unsupported(field: str, value: Any, *supported: str) -> Cause:
    listed = ", ".join(f'"{each}"' for each in supported)
    message = f"Unsupported value: {json.dumps(value)}: supported values: {listed}"
    return Cause(field, "FieldValueNotSupported", message)


def _too_long(field: str, limit: int) -> Cause:
    message = f"Too long: may not be more than {limit} bytes"
    return Cause(field, "FieldValueTooLong", message)


def _duplicate(field: str, value: Any) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {json.dumps(value)}")


def check_base64(data: Mapping[str, str]) -> None:
    """Check that a Secret's values can be decoded.

    Raises:
        ApiError: 400.
    """
    for value in data.values():
        try:
            base64.b64decode(value, validate=True)
        except ValueError as error:
            wrong = re.search("[^A-Za-z0-9+/]", value)
            raise bad_request(
                'Secret in version "v1" cannot be handled as a Secret: illegal base64 data at '
                f"input byte {wrong.start() if wrong else len(value)}"
            ) from error


def check(kind: str, body: Object) -> None:
    """Check a new object.

    Raises:
        ApiError: 422, with every rule that it breaks.
    """
    metadata = body["metadata"]
    causes = [*metadata_causes(kind, metadata)]
    if kind == "Pod":
        causes += pod_causes(body["spec"])
    elif kind == "Secret":
        causes += secret_causes(body.get("data") or {})
    elif kind == "Event" and body["involvedObject"].get("namespace") != metadata["namespace"]:
        given = body["involvedObject"].get("namespace", "")
        why = "does not match event.namespace"
        causes.append(invalid_value("involvedObject.namespace", given, why))
    if causes:
        raise invalid(kind, body["metadata"].get("name", ""), causes)


def metadata_causes(kind: str, metadata: Mapping[str, Any]) -> Iterator[Cause]:
    """Rules for names, labels and annotations."""
    name = metadata.get("name", "")
    if not name:
        yield _required("metadata.name", "name or generateName is required")
    elif kind == "Namespace":
        if not re.fullmatch(_LABEL, name) or len(name) > 63:
            yield invalid_value("metadata.name", name, _LABEL_RULE)
    elif len(name) > 253:
        yield invalid_value("metadata.name", name, "must be no more than 253 characters")
    elif not re.fullmatch(_SUBDOMAIN, name):
        yield invalid_value("metadata.name", name, _SUBDOMAIN_RULE)
    yield from _label_causes("metadata.labels", metadata.get("labels") or {})
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        yield from _key_causes("metadata.annotations", key.lower())
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > 2**18:
        yield _too_long("metadata.annotations", 2**18)
    for owner in metadata.get("ownerReferences") or []:
        for part in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(part):
                yield invalid_value(f"metadata.ownerReferences.{part}", "", "must not be empty")


def secret_causes(data: Mapping[str, str]) -> Iterator[Cause]:
    """Rules for what a Secret holds."""
    for key in data:
        if not re.fullmatch(_CONFIG_KEY, key):
            yield invalid_value(f"data[{key}]", key, _CONFIG_KEY_RULE)
    if sum(len(base64.b64decode(value)) for value in data.values()) > 2**20:
        yield _too_long("data", 2**20)


def _label_causes(field: str, labels: Mapping[str, str]) -> Iterator[Cause]:
    for key, value in labels.items():
        yield from _key_causes(field, key)
        if len(value) > 63:
            yield invalid_value(field, value, "must be no more than 63 bytes")
        elif not re.fullmatch(_VALUE, value):
            yield invalid_value(field, value, _VALUE_RULE)


def _key_causes(field: str, key: str) -> Iterator[Cause]:
    prefix, _, name = key.rpartition("/")
    if prefix and not re.fullmatch(_SUBDOMAIN, prefix):
        yield invalid_value(field, key, f"prefix part {_SUBDOMAIN_RULE}")
    if not name:
        yield invalid_value(field, key, "name part must be non-empty")
    elif len(name) > 63:
        yield invalid_value(field, key, "name part must be no more than 63 bytes")
    elif not re.fullmatch(_QUALIFIED, name):
        yield invalid_value(field, key, _KEY_RULE)


def pod_causes(spec: Mapping[str, Any]) -> Iterator[Cause]:
    """Rules for a pod's spec, with its defaults filled in."""
    volumes: set[str] = set()
    for at, volume in enumerate(spec.get("volumes", [])):
        yield from _volume_causes(f"spec.volumes[{at}]", volume, volumes)
    if not spec.get("containers"):
        yield _required("spec.containers")
    names: set[str] = set()
    for group in ("containers", "initContainers"):
        for at, container in enumerate(spec.get(group, [])):
            yield from _container_causes(f"spec.{group}[{at}]", container, names, volumes)
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        supported = ("Always", "OnFailure", "Never")
        yield _unsupported("spec.restartPolicy", spec["restartPolicy"], *supported)
    yield from _label_causes("spec.nodeSelector", spec.get("nodeSelector") or {})
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= 2**31 - 1:
        why = "must be between 1 and 2147483647, inclusive"
        yield invalid_value("spec.activeDeadlineSeconds", deadline, why)
    for at, toleration in enumerate(spec.get("tolerations") or []):
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            why = "value must be empty when `operator` is 'Exists'"
            yield invalid_value(f"spec.tolerations[{at}].operator", toleration["value"], why)


def _volume_causes(field: str, volume: Mapping[str, Any], names: set[str]) -> Iterator[Cause]:
    name = volume.get("name", "")
    if not name:
        yield _required(f"{field}.name")
    elif not re.fullmatch(_LABEL, name) or len(name) > 63:
        yield invalid_value(f"{field}.name", name, _LABEL_RULE)
    elif name in names:
        yield _duplicate(f"{field}.name", name)
    names.add(name)
    for source in sorted(volume.keys() - {"name"})[1:]:
        message = "Forbidden: may not specify more than 1 volume type"
        yield Cause(f"{field}.{source}", "FieldValueForbidden", message)


def _container_causes(
    field: str, container: Mapping[str, Any], names: set[str], volumes: set[str]
) -> Iterator[Cause]:
    name = container.get("name", "")
    if not name:
        yield _required(f"{field}.name")
    elif not re.fullmatch(_LABEL, name) or len(name) > 63:
        yield invalid_value(f"{field}.name", name, _LABEL_RULE)
    elif name in names:
        yield _duplicate(f"{field}.name", name)
    names.add(name)
    image = container.get("image", "")
    if not image:
        yield _required(f"{field}.image")
    elif image != image.strip():
        yield invalid_value(f"{field}.image", image, "must not have leading or trailing whitespace")
    if container["terminationMessagePolicy"] not in ("File", "FallbackToLogsOnError"):
        policy = container["terminationMessagePolicy"]
        where = f"{field}.terminationMessagePolicy"
        yield _unsupported(where, policy, "FallbackToLogsOnError", "File")
    yield from _env_causes(field, container)
    yield from _mount_causes(field, container, volumes)
    if container["imagePullPolicy"] not in ("Always", "IfNotPresent", "Never"):
        supported = ("Always", "IfNotPresent", "Never")
        policy = container["imagePullPolicy"]
        yield _unsupported(f"{field}.imagePullPolicy", policy, *supported)
    yield from _resource_causes(f"{field}.resources", container["resources"])


def _mount_causes(field: str, container: Mapping[str, Any], volumes: set[str]) -> Iterator[Cause]:
    paths: set[str] = set()
    for at, mount in enumerate(container.get("volumeMounts", [])):
        below = f"{field}.volumeMounts[{at}]"
        if mount.get("name") not in volumes:
            found = f"Not found: {json.dumps(mount.get('name', ''))}"
            yield Cause(f"{below}.name", "FieldValueNotFound", found)
        if not mount.get("mountPath"):
            yield _required(f"{below}.mountPath")
        elif mount["mountPath"] in paths:
            yield invalid_value(f"{below}.mountPath", mount["mountPath"], "must be unique")
        paths.add(mount.get("mountPath", ""))


def _env_causes(field: str, container: Mapping[str, Any]) -> Iterator[Cause]:
    for at, variable in enumerate(container.get("env", [])):
        below, name = f"{field}.env[{at}]", variable.get("name", "")
        if not name:
            yield _required(f"{below}.name")
        elif "=" in name or not name.isascii() or not name.isprintable():
            rule = "a valid environment variable name must consist only of printable ASCII "
            yield invalid_value(f"{below}.name", name, f"{rule}characters other than '='")
        if variable.get("value") and variable.get("valueFrom"):
            why = "may not be specified when `value` is not empty"
            yield invalid_value(f"{below}.valueFrom", "", why)


def _resource_causes(field: str, resources: Mapping[str, Any]) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for which, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            standard = name in _STANDARD_RESOURCES or name.startswith("hugepages-")
            if not standard and "/" not in name:
                for why in ("type or fully qualified", "for containers"):
                    where = f"{field}.{which}[{name}]"
                    yield invalid_value(where, name, f"must be a standard resource {why}")
            if quantity(amount) < 0:
                why = "must be greater than or equal to 0"
                yield invalid_value(f"{field}.{which}[{name}]", amount, why)
            elif "/" in name and quantity(amount) % 1:
                yield invalid_value(f"{field}.{which}[{name}]", amount, "must be an integer")
    for name, amount in requests.items():
        limit, extended = limits.get(name), "/" in name or name.startswith("hugepages-")
        if limit is None and extended:
            why = "Limit must be set for non overcommitable resources"
            yield _required(f"{field}.limits", why)
        elif limit is not None and extended and quantity(amount) != quantity(limit):
            why = f"must be equal to {name} limit of {limit}"
            yield invalid_value(f"{field}.requests", amount, why)
        elif limit is not None and quantity(amount) > quantity(limit):
            why = f"must be less than or equal to {name} limit of {limit}"
            yield invalid_value(f"{field}.requests", amount, why)


def normalise_quantities(kind: str, body: Object) -> None:
    """Write a pod's amounts, in place, as an API server gives them back.

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
                amounts[name] = canonical(amount)
