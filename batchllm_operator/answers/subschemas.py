"""The schemas inside a JSON schema."""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from batchllm_operator.errors import SpecError
from batchllm_operator.spec.limits import shown

VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose content is no schema."""
BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose content is schemas by name."""
_DEFINITIONS: Final = ("$defs", "definitions")
_MAX_PARTS: Final = 20_000


def parts(schema: Any, *, definitions: bool = False) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with their paths from there; maybe its definitions, too."""
    if not isinstance(schema, dict):
        return
    for name, content in schema.items():
        if name in VALUES or (name in _DEFINITIONS and not definitions):
            continue
        if isinstance(content, dict) and name not in BY_NAME:
            yield name, content
        elif isinstance(content, dict | list):
            steps = content.items() if isinstance(content, dict) else enumerate(content)
            yield from ((f"{name}.{step}", part) for step, part in steps if isinstance(part, dict))


def resolved(root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what its references name in their places, and without definitions.

    A SpecError names a property that contains itself, refers to nothing, or is too large.
    """
    try:
        resolver = _Resolver(root)
        properties = root["properties"].items()
        fields = {name: resolver.schema(schema, name) for name, schema in properties}
        others = {name: content for name, content in root.items() if name != "properties"}
        return {**resolver.schema(others, ""), "properties": fields}
    except RecursionError:
        raise refused("", "is nested too deeply") from None


def refused(where: str, reason: str) -> SpecError:
    """The error of a schema that can't be columns; `where` is a property, or empty."""
    place = f"property {shown(where)!r} " if where else ""
    return SpecError(f"response_format.json_schema: {place}{reason}")


class _Resolver:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._num_parts = root, 0

    def schema(self, schema: Any, where: str, inside: tuple[str, ...] = ()) -> Any:
        """Args: `inside` are the references that lead to the schema."""
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise refused(where, f"makes a schema of more than {_MAX_PARTS:,} parts")
        if isinstance(schema, list):
            return [self.schema(part, where, inside) for part in schema]
        if not isinstance(schema, dict):
            return schema
        for name in ("$dynamicRef", "$recursiveRef"):
            if name in schema:
                raise refused(where, f"uses {name}, which may contain itself")
        if where and isinstance(schema.get("$id"), str):
            raise refused(where, "has an $id, which only the whole schema may have")
        kept = {}
        for name, content in schema.items():
            if name in VALUES:
                kept[name] = content
            elif name in BY_NAME and isinstance(content, dict) and name not in _DEFINITIONS:
                parts = content.items()
                kept[name] = {key: self.schema(part, where, inside) for key, part in parts}
            elif name not in ("$ref", *_DEFINITIONS):
                kept[name] = self.schema(content, where, inside)
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return kept
        if ref in inside or ref == "#":
            raise refused(where, "contains itself, which no column can hold")
        named = self.schema(self._target(ref, where), where, (*inside, ref))
        return {**named, **kept} if isinstance(named, dict) else kept

    def _target(self, ref: str, where: str) -> Any:
        """What a reference names: a JSON pointer from the schema's top."""
        if not ref.startswith("#/"):
            raise refused(where, f"refers to {shown(ref)!r}; only #/$defs/NAME works")
        place: Any = self._root
        for step in ref.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                place = place[int(step)]
            elif isinstance(place, dict) and step in place:
                place = place[step]
            else:
                raise refused(where, f"refers to {shown(ref)!r}, which isn't in the schema")
        return place
