"""Types of the API's objects, read from the schemas that kubernetes-validate comes with.

A real API server drops fields that it doesn't know (or refuses them, when asked to), refuses values
of a wrong type, and takes the keys of strategic merges from the same description.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from typing import Any

from support.kubernetes.status import ApiError, Object, bad_request

VERSION = "1.37.0"
_CORE = "io.k8s.api.core.v1."
_PREFIXES = {
    "PriorityClass": "io.k8s.api.scheduling.v1.",
    "SelfSubjectAccessReview": "io.k8s.api.authorization.v1.",
}
_GO_TYPES = {"integer": "int32", "boolean": "bool", "number": "float64"}
_GO_NAMES = {str: "string", bool: "bool", int: "number", float: "number", list: "array"}
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


@functools.cache
def _definitions() -> dict[str, Object]:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{VERSION}-local" / "_definitions.json").read_text("utf-8")
    return dict(json.loads(text)["$defs"])


def schema_of(kind: str) -> Object:
    """The schema of a kind of object."""
    return _definitions()[_PREFIXES.get(kind, _CORE) + kind]


def resolve(schema: Object) -> Object:
    """The schema that a `$ref` names, or the schema itself."""
    reference = schema.get("$ref")
    return _definitions()[reference.rpartition("/")[2]] if reference else schema


def prune(kind: str, body: Object) -> tuple[Object, list[str]]:
    """The object without fields that its kind doesn't have, and the paths of those fields.

    Raises:
        ApiError: 400, a field has a value of another type.
    """
    unknown: list[str] = []
    pruned = _walk(resolve(schema_of(kind)), body, kind, kind, "", unknown)
    return pruned, unknown


def _walk(stated: Object, value: Any, kind: str, owner: str, path: str, unknown: list[str]) -> Any:
    """Prune a value; `owner` is the type that has it as a field."""
    if value is None:
        return None
    schema = resolve(stated)
    if not _fits(schema, value):
        raise _wrong_type(kind, owner, path, value, stated)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [_walk(items, v, kind, owner, f"{path}[{i}]", unknown) for i, v in enumerate(value)]
    if isinstance(value, dict):
        owner = _go_name(stated) or owner
        return _walk_object(schema, value, kind, owner, path, unknown)
    return value


def _walk_object(
    schema: Object, value: Object, kind: str, owner: str, path: str, unknown: list[str]
) -> Object:
    properties, rest = schema.get("properties"), schema.get("additionalProperties")
    if properties is None and not isinstance(rest, dict):
        return value
    result = {}
    for name, each in value.items():
        below = f"{path}.{name}" if path else name
        field = (properties or {}).get(name) or (rest if isinstance(rest, dict) else None)
        if field is None:
            unknown.append(below)
        elif each is not None:
            at = below if properties else path  # keys of a map are no fields
            result[name] = _walk(field, each, kind, owner, at, unknown)
    return result


def _fits(schema: Object, value: Any) -> bool:
    if "oneOf" in schema:
        return any(_fits(option, value) for option in schema["oneOf"])
    names = schema.get("type")
    if names is None:
        return True
    names = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in names
    return any(name != "null" and isinstance(value, _PYTHON_TYPES[name]) for name in names)


def _wrong_type(kind: str, owner: str, path: str, value: Any, stated: Object) -> ApiError:
    given = _GO_NAMES.get(type(value), "object")
    plain = re.sub(r"\[\d+\]", "", path)
    return bad_request(
        f'{kind} in version "v1" cannot be handled as a {kind}: json: cannot unmarshal {given} '
        f"into Go struct field {owner}.{plain} of type {_go_type(stated)}"
    )


def _go_name(stated: Object) -> str:
    """The name of a type that has one."""
    return str(stated.get("$ref", "")).rpartition(".")[2]


def _go_type(stated: Object) -> str:
    if name := _go_name(stated):
        return f"v1.{name}"
    names = stated.get("type", "object")
    name = names if isinstance(names, str) else next(each for each in names if each != "null")
    if name == "array":
        return f"[]{_go_type(stated.get('items', {}))}"
    if name == "object":
        return f"map[string]{_go_type(stated.get('additionalProperties') or {'type': 'string'})}"
    return str(stated.get("format") or _GO_TYPES.get(name, name))
