"""Checks events of OpenLineage against the schemas that they name: published ones, and our own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

from batchllm_operator.operators.openlineage import SCHEMA

_FOLDER: Final = Path(__file__).parents[1] / "data" / "openlineage"
_FILES: Final = [json.loads(path.read_text()) for path in sorted(_FOLDER.glob("*.json"))]
_SCHEMAS: Final[Mapping[str, Any]] = {each["$id"]: each for each in (*_FILES, SCHEMA)}
_REGISTRY: Final[Registry[Any]] = Registry().with_resources(
    (uri, Resource.from_contents(schema)) for uri, schema in _SCHEMAS.items()
)
_FORMATS: Final = FormatChecker(("date-time", "uuid"))  # an absent library is a KeyError


def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or bool(urlsplit(value).scheme)


_FORMATS.checks("uri")(_is_uri)


def check_event(event: Mapping[str, Any]) -> None:
    """Raise `ValidationError` if an event, or one of its facets, isn't as its schema has it."""
    _check(event["schemaURL"], event)
    for owner in (event["run"], event["job"]):
        check_facets(owner.get("facets", {}))
    for table in (*event.get("inputs", ()), *event.get("outputs", ())):
        for name in table.keys() & {"facets", "inputFacets", "outputFacets"}:
            check_facets(table[name])


def check_facets(facets: Mapping[str, Mapping[str, Any]]) -> None:
    """So for facets by their names, which have to be those of the schemas that they name."""
    for name, facet in facets.items():
        _check(facet["_schemaURL"], facet)
        schema = _SCHEMAS[facet["_schemaURL"].partition("#")[0]]
        assert name in schema.get("properties", (name,)), f"{name} isn't of {schema['$id']}"


def all_facets(event: Mapping[str, Any]) -> Iterator[str]:
    """Names of the facets of an event, of its tables too."""
    tables = (*event.get("inputs", ()), *event.get("outputs", ()))
    for owner in (event["run"], event["job"], *tables):
        for name in owner.keys() & {"facets", "inputFacets", "outputFacets"}:
            yield from owner[name]


def _check(url: str, value: Mapping[str, Any]) -> None:
    checked = Draft202012Validator({"$ref": url}, registry=_REGISTRY, format_checker=_FORMATS)
    checked.validate(value)
