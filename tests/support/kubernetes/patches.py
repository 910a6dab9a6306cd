"""The three patch formats that clients send: JSON patch, merge patch and strategic merge patch."""

from __future__ import annotations

import copy
from typing import Any

from support.kubernetes.schema import resolve, schema_of
from support.kubernetes.status import ApiError, Object, bad_request, unsupported_media_type

JSON = "application/json-patch+json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def patched(current: Object, patch: Any, content_type: str) -> Object:
    """A patched copy of an object.

    Raises:
        ApiError: 400 or 422, the patch doesn't fit; 415, an unknown format.
    """
    if content_type == JSON:
        return _json_patched(copy.deepcopy(current), patch)
    if content_type not in (MERGE, STRATEGIC):
        raise unsupported_media_type()
    if not isinstance(patch, dict):
        raise bad_request("a merge patch must be an object")
    if content_type == MERGE:
        return dict(_merged(current, patch))
    return _strategic(current, patch, resolve(schema_of(current["kind"])))


def _merged(current: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(current) if isinstance(current, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _strategic(current: Any, patch: Object, schema: Object) -> Object:
    directive = patch.get("$patch")
    body = {key: value for key, value in patch.items() if not key.startswith("$")}
    if directive == "replace":
        return copy.deepcopy(body)
    if directive == "delete":
        return {}
    result = dict(current) if isinstance(current, dict) else {}
    removals = {key: value for key, value in patch.items() if key.startswith("$deleteFromPrim")}
    for key, values in removals.items():
        name = key.partition("/")[2]
        result[name] = [each for each in result.get(name, []) if each not in values]
    for key, value in body.items():
        field = _field(schema, key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list):
            result[key] = _strategic_list(result.get(key) or [], value, field)
        elif isinstance(value, dict):
            result[key] = _strategic(result.get(key), value, resolve(field))
        else:
            result[key] = value
    return result


def _field(schema: Object, key: str) -> Object:
    """A field's schema, with what stands beside its `$ref`."""
    found: Object = schema.get("properties", {}).get(key) or {}
    return found


def _strategic_list(current: list[Any], patch: list[Any], field: Object) -> list[Any]:
    if "merge" not in str(field.get("x-kubernetes-patch-strategy", "")):
        return copy.deepcopy(patch)
    key = field.get("x-kubernetes-patch-merge-key")
    if key is None:  # a list of plain values is a set
        return [*current, *(each for each in patch if each not in current)]
    if any(each.get("$patch") == "replace" for each in patch):
        return copy.deepcopy([each for each in patch if "$patch" not in each])
    items = resolve(field.get("items", {}))
    result = list(current)
    for each in patch:
        if key not in each:
            raise ApiError(
                500, "InternalError", f"map: {each} does not contain declared merge key: {key}"
            )
        at = next((i for i, old in enumerate(result) if old.get(key) == each[key]), None)
        if each.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(_strategic({}, each, items))
        else:
            result[at] = _strategic(result[at], each, items)
    return result


def _json_patched(document: Object, operations: Any) -> Object:
    """RFC 6902."""
    if not isinstance(operations, list):
        raise bad_request("a JSON patch must be a list of operations")
    for operation in operations:
        name, path = operation.get("op"), operation.get("path", "")
        try:
            if name in ("move", "copy"):
                value = copy.deepcopy(_at(document, _steps(operation["from"])))
                if name == "move":
                    _remove(document, _steps(operation["from"]))
                _add(document, _steps(path), value)
            elif name in ("add", "replace"):
                if name == "replace":
                    _remove(document, _steps(path))
                _add(document, _steps(path), operation.get("value"))
            elif name == "remove":
                _remove(document, _steps(path))
            elif name == "test":
                if _at(document, _steps(path)) != operation.get("value"):
                    raise _rejected()
            else:
                raise bad_request(f"unknown JSON patch operation {name!r}")
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise _rejected() from error
    return document


def _rejected() -> ApiError:
    """A JSON patch that doesn't apply: the answer doesn't say where."""
    message = "the server rejected our request due to an error in our request"
    return ApiError(422, "Invalid", message, {})


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _at(node: Any, steps: list[str]) -> Any:
    for step in steps:
        node = node[int(step)] if isinstance(node, list) else node[step]
    return node


def _add(document: Object, steps: list[str], value: Any) -> None:
    parent, last = _at(document, steps[:-1]), steps[-1]
    if isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else int(last), value)
    else:
        parent[last] = value


def _remove(document: Object, steps: list[str]) -> None:
    parent, last = _at(document, steps[:-1]), steps[-1]
    del parent[int(last) if isinstance(parent, list) else last]
