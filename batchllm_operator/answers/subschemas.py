"""The schemas inside a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose content is no schema."""
BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose content is schemas by name."""
_DEFINITIONS: Final = ("$defs", "definitions")
_MAX_PARTS: Final = 20_000


def parts(schema: Any, *, definitions: bool = False) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, each with its path from there.

    Args:
        definitions: whether those that it only defines belong to it.
    """
    if not isinstance(schema, dict):
        return
    for name, content in schema.items():
        if name in VALUES or (name in _DEFINITIONS and not definitions):
            continue
        if isinstance(content, dict) and name not in BY_NAME:
            yield name, content
        elif isinstance(content, dict | list):
            steps = content.items() if isinstance(content, dict) else enumerate(content)
            yield from ((f"{name}.{step}", each) for step, each in steps if isinstance(each, dict))


def target(ref: str, root: Mapping[str, Any]) -> Any:
    """What a reference names: a JSON pointer from the schema's top.

    Raises:
        LookupError: it names nothing.
    """
    if ref != "#" and not ref.startswith("#/"):
        raise LookupError(ref)
    found: Any = root
    for step in ref.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            raise LookupError(ref)
    return found


def without_references(root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema with what its references name in their places; None if that is too large."""
    num_parts = 0

    def resolved(schema: Any, *, by_name: bool = False) -> Any:
        nonlocal num_parts
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise RecursionError
        if isinstance(schema, list):
            return [resolved(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if by_name:
            return {name: resolved(each) for name, each in schema.items()}
        kept = {
            name: content if name in VALUES else resolved(content, by_name=name in BY_NAME)
            for name, content in schema.items()
            if name not in ("$ref", *_DEFINITIONS)
        }
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return kept
        named = resolved(target(ref, root))
        return {**named, **kept} if isinstance(named, dict) else kept

    try:
        whole: dict[str, Any] = resolved(root)
    except (LookupError, RecursionError):
        return None
    return whole
