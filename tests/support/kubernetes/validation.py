"""The API server's rules for objects: names, labels, containers' resources and Secrets' sizes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from support.kubernetes.quantities import quantity
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
_QUANTITY_RULE = (
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)


def _required(field: str, why: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value{': ' if why else ''}{why}")


def invalid_value(field: str, value: Any, why: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {why}")


def check(kind: str, body: Object) -> None:
    """Check an object.

    Raises:
        ApiError: 422, with every rule that it breaks; 400, an amount isn't one.
    """
    causes = [*_metadata_causes(body["metadata"])]
    if kind == "Pod":
        causes += _pod_causes(body["spec"], "spec")
    elif kind == "Job":
        causes += _pod_causes(body["spec"]["template"]["spec"], "spec.template.spec")
    elif kind == "Secret":
        data = body.get("data") or {}
        if sum(len(base64.b64decode(value)) for value in data.values()) > 2**20:
            message = f"Too long: may not be more than {2**20} bytes"
            causes.append(Cause("data", "FieldValueTooLong", message))
    if causes:
        raise invalid(kind, body["metadata"].get("name", ""), causes)


def _metadata_causes(metadata: Mapping[str, Any]) -> Iterator[Cause]:
    name = metadata.get("name", "")
    if not name:
        yield _required("metadata.name", "name or generateName is required")
    elif len(name) > 253:
        yield invalid_value("metadata.name", name, "must be no more than 253 bytes")
    elif not re.fullmatch(_SUBDOMAIN, name):
        yield invalid_value("metadata.name", name, _SUBDOMAIN_RULE)
    for key, value in (metadata.get("labels") or {}).items():
        yield from _key_causes("metadata.labels", key)
        if len(value) > 63:
            yield invalid_value("metadata.labels", value, "must be no more than 63 bytes")
        elif not re.fullmatch(_VALUE, value):
            yield invalid_value("metadata.labels", value, _VALUE_RULE)


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


def _pod_causes(spec: Mapping[str, Any], path: str) -> Iterator[Cause]:
    if not spec.get("containers"):
        yield _required(f"{path}.containers")
    names: set[str] = set()
    for group in ("containers", "initContainers"):
        for at, container in enumerate(spec.get(group, [])):
            field, name = f"{path}.{group}[{at}]", container.get("name", "")
            if not name:
                yield _required(f"{field}.name")
            elif not re.fullmatch(_LABEL, name) or len(name) > 63:
                yield invalid_value(f"{field}.name", name, _LABEL_RULE)
            elif name in names:
                message = f"Duplicate value: {json.dumps(name)}"
                yield Cause(f"{field}.name", "FieldValueDuplicate", message)
            names.add(name)
            if not container.get("image"):
                yield _required(f"{field}.image")
            yield from _resource_causes(f"{field}.resources", container["resources"])


def _resource_causes(field: str, resources: Mapping[str, Any]) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for which, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            where = f"{field}.{which}[{name}]"
            if name not in _STANDARD_RESOURCES and "/" not in name:
                for why in ("type or fully qualified", "for containers"):
                    yield invalid_value(where, name, f"must be a standard resource {why}")
            if _decoded(amount) < 0:
                yield invalid_value(where, amount, "must be greater than or equal to 0")
            elif "/" in name and _decoded(amount) % 1:
                yield invalid_value(where, amount, "must be an integer")
    for name, amount in requests.items():
        limit, extended = limits.get(name), "/" in name
        if limit is None and extended:
            why = "Limit must be set for non overcommitable resources"
            yield _required(f"{field}.limits", why)
        elif limit is not None and extended and quantity(amount) != quantity(limit):
            why = f"must be equal to {name} limit of {limit}"
            yield invalid_value(f"{field}.requests", amount, why)
        elif limit is not None and quantity(amount) > quantity(limit):
            why = f"must be less than or equal to {name} limit of {limit}"
            yield invalid_value(f"{field}.requests", amount, why)


def _decoded(amount: Any) -> Decimal:
    """An amount; one that is none keeps a real server from decoding the pod at all."""
    try:
        return quantity(amount)
    except ValueError as error:
        why = f'Pod in version "v1" cannot be handled as a Pod: {_QUANTITY_RULE}'
        raise bad_request(why) from error
