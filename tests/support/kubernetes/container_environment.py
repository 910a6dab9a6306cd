"""The environment of a container: what its pod's spec says, resolved as a kubelet does it."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from support.kubernetes.quantities import quantity
from support.kubernetes.status import Object

# (plural, name) -> the pod's namespace's object of that name, or None.
Read = Callable[[str, str], Awaitable[Object | None]]

_KINDS = {"secrets": ("secret", "Secret"), "configmaps": ("configmap", "ConfigMap")}
_REFERENCE = re.compile(r"\$(?:\$|\((?P<name>[^()]+)\))")
_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class MissingReferenceError(Exception):
    """A Secret, a ConfigMap or a key isn't there; the message is the kubelet's."""


async def contents(read: Read, plural: str, name: str, optional: bool) -> dict[str, bytes]:
    """The entries of a Secret or ConfigMap; none if it is optional and isn't there.

    Raises:
        MissingReferenceError: It isn't there.
    """
    found = await read(plural, name)
    if found is None:
        if optional:
            return {}
        raise MissingReferenceError(f'{_KINDS[plural][0]} "{name}" not found')
    data = found.get("data") or {}
    if plural == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    plain = {key: str(value).encode() for key, value in data.items()}
    binary = found.get("binaryData") or {}
    return {**plain, **{key: base64.b64decode(value) for key, value in binary.items()}}


async def resolve_environment(container: Object, pod: Object, read: Read) -> dict[str, str]:
    """All variables of a container; later ones and `env` win.

    Raises:
        MissingReferenceError: Something that isn't optional isn't there.
    """
    resolved: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for field, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if field in source:
                wanted = source[field]
                optional = wanted.get("optional", False)
                entries = await contents(read, plural, wanted["name"], optional)
                for key, value in entries.items():
                    resolved[source.get("prefix", "") + key] = value.decode()
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            text = await _value_from(variable["valueFrom"], container, pod, read)
            if text is not None:
                resolved[variable["name"]] = text
        else:
            resolved[variable["name"]] = expand(variable.get("value", ""), resolved)
    return resolved


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; `$$` is an escaped `$`, and unknown names stay as they are."""

    def replacement(found: re.Match[str]) -> str:
        if found["name"] is None:
            return "$"
        return variables.get(found["name"], found[0])

    return _REFERENCE.sub(replacement, text)


async def _value_from(source: Object, container: Object, pod: Object, read: Read) -> str | None:
    for field, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if field in source:
            wanted = source[field]
            optional = wanted.get("optional", False)
            entries = await contents(read, plural, wanted["name"], optional)
            if wanted["key"] in entries:
                return entries[wanted["key"]].decode()
            if optional:
                return None
            where = f"{pod['metadata']['namespace']}/{wanted['name']}"
            kind = _KINDS[plural][1]
            raise MissingReferenceError(f"couldn't find key {wanted['key']} in {kind} {where}")
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource_of(container, pod, source["resourceFieldRef"])
    return None


def field_of(pod: Object, path: str) -> str:
    """A field of the pod, as the downward API names it."""
    if found := _SUBSCRIPT.match(path):
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = pod["metadata"].get(path.partition(".")[2], {})
        return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))
    if path in ("status.podIPs", "status.hostIPs"):
        return ",".join(each["ip"] for each in pod["status"].get(path.partition(".")[2], []))
    value: Any = pod
    for step in path.split("."):
        value = value.get(step, "") if isinstance(value, dict) else ""
    return str(value)


def _resource_of(container: Object, pod: Object, source: Object) -> str:
    name = source.get("containerName", container["name"])
    of = next(each for each in pod["spec"]["containers"] if each["name"] == name)
    which, _, resource = source["resource"].partition(".")
    stated = of.get("resources", {}).get(which, {}).get(resource, "0")
    divisor = quantity(source.get("divisor", "1")) or quantity(1)
    return str(math.ceil(quantity(stated) / divisor))
