"""Describes the faults of a spec's fields, without repeating values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ValidationError

from batchllm_operator.secrets.finding import names_secret
from batchllm_operator.spec.limits import shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MAX_FAULTS: Final = 20
_MAX_REASON_LEN: Final = 1000
_WHOLE: Final = "must be a whole number"
_REASONS: Final[Mapping[str, str]] = {
    "missing": "is missing, and required",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), _WHOLE),
    "float_type": "must be a number",
    "float_parsing": "must be a number without a unit, such as 0.05 or 1e9",
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
    **dict.fromkeys(("string_too_short", "too_short"), "must not be empty"),
    "string_pattern_mismatch": (
        "must be letters, digits, _ and -, at most 100 of them, a letter or digit first"
    ),
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "tuple_type": "must be a list",
    **dict.fromkeys(("dict_type", "mapping_type"), "must be a mapping of names to values"),
    "union_tag_invalid": "type must be {expected_tags}",
    "union_tag_not_found": "must be a section of fields with a type",
    **dict.fromkeys(
        ("byte_size", "byte_size_unit"), "must be a number of bytes, or text like 4GiB"
    ),
    "invalid_key": "names of fields must be text; put it in quotes",
    "invalid-json-value": "must be text, a number, true, false, a list or a mapping (quote a date)",
}
_KINDS: Final = {"number", "source", "dict", "list", "str", "int", "float", "bool", "[key]"}
"""Parts of pydantic's `loc` that name the tried type, not a field or an index."""
_WITHOUT_INPUT: Final = ("value_error", "extra_forbidden", "invalid_key")
_MAPPINGS: Final = (
    *("engine.extra_args", "model.adapters", "prompt.truncate", "labels", "label_values"),
)
_OF_ANY_KIND: Final = "must be text, a finite number, true or false, or a list of these"
_CLOSENESS: Final = 0.6
_CLOSENESS_ELSEWHERE: Final = 0.8


def describe(error: ValidationError, spec: type[BaseModel]) -> str:
    """All faults on one line: field names and reasons, with suggestions for unknown names."""
    faults: dict[str, None] = {}
    for fault in map(_of_name, error.errors(include_url=False)):
        where, section = _place(spec, fault["loc"])
        reason = _reason(fault, section, spec)
        if fault["input"] is None and fault["type"] not in _WITHOUT_INPUT:
            reason = f"has no value; it {reason}"
        reason = shown(reason, _MAX_REASON_LEN)
        faults[f"{shown(where)}: {reason}" if where else reason] = None
    reasons = list(faults)
    more = [f"and {len(reasons) - _MAX_FAULTS} more"] if len(reasons) > _MAX_FAULTS else []
    return "; ".join(reasons[:_MAX_FAULTS] + more)


def _of_name(fault: ErrorDetails) -> ErrorDetails:
    """Let the place of an invalid name end with that name, as YAML writes it (null for None)."""
    is_key = fault["loc"][-1:] == ("[key]",)
    if not is_key and fault["type"] != "invalid_key":
        return fault
    name = json.dumps(fault["input"], default=str).strip('"')
    place = fault["loc"][: -2 if is_key else -1]
    return {**fault, "type": "invalid_key", "loc": (*place, name)}


def _reason(fault: ErrorDetails, section: type[BaseModel] | None, spec: type[BaseModel]) -> str:
    kind = fault["type"]
    if section is None and kind != "invalid_key":
        return _OF_ANY_KIND
    if section is not None and kind == "extra_forbidden":
        return _unknown(str(fault["loc"][-1]), fault["input"], section, spec)
    if section is not None and kind == "model_type":
        return f"must be a section of fields: {', '.join(section.model_fields)}"
    if kind == "value_error":
        return fault["msg"].removeprefix("Value error, ")
    limits = {name: _plain(value) for name, value in fault.get("ctx", {}).items()}
    reason = _REASONS.get(kind, "isn't valid").format(**limits)
    if "number" in fault["loc"] and reason == _WHOLE:
        return f"{reason}, {{column: NAME}} or {{learned: true}}"
    if kind == "string_type" and isinstance(fault["input"], int | float | date):
        return f"{reason}; put it in quotes"
    return reason


def _plain(limit: object) -> str:
    """A limit as YAML writes it: 1 for 1.0, true for True."""
    return f"{limit:.15g}" if isinstance(limit, float) else str(limit).replace("True", "true")


def _unknown(name: str, value: object, section: type[BaseModel], spec: type[BaseModel]) -> str:
    """Suggest the nearest field for an unknown name, here or elsewhere in the spec."""
    wanted = name.replace("-", "_").lower()
    near = difflib.get_close_matches(wanted, section.model_fields, n=1, cutoff=_CLOSENESS)
    if near:
        return f"unknown field; did you mean {near[0]}?"
    if names_secret(name) and isinstance(value, str):
        return "unknown field; credentials come from the environment or an Airflow connection"
    paths: dict[str, list[str]] = {}
    for path in _paths(spec):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    cutoff = _CLOSENESS_ELSEWHERE if section is spec else 1.0
    if near := difflib.get_close_matches(wanted, paths, n=1, cutoff=cutoff):
        return f"unknown field; did you mean {' or '.join(paths[near[0]])}?"
    return f"unknown field; known are {', '.join(section.model_fields)}"


def _paths(spec: type[BaseModel]) -> Iterator[str]:
    """The fields of sections, by their dotted names."""
    for name, field in spec.model_fields.items():
        # Fields of `prompts` are those of others.
        for section in list(_sections_in(field.annotation))[: name != "prompts"]:
            yield from (f"{name}.{inner}" for inner in section.model_fields)
            yield from (f"{name}.{path}" for path in _paths(section))


def _place(spec: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted name of a place, and its section: none if its value may be of several kinds."""
    where, owner, inner = "", spec, [spec]
    for part in loc:
        if len(inner) > 1:  # pydantic names the chosen form of a section
            forms = [
                form for form in inner if part in get_args(form.model_fields["type"].annotation)
            ]
            inner = forms or inner[:1]
        elif isinstance(part, int) and where:
            where += f"[{part}]"
        elif inner and where != "prompts" and part in inner[0].model_fields:
            owner, where = inner[0], f"{where}.{part}".lstrip(".")
            inner = list(_sections_in(owner.model_fields[str(part)].annotation))
        elif inner or where.startswith(_MAPPINGS):
            where = where if part in _KINDS else f"{where}.{part}".lstrip(".")
        else:
            return where, None
    return where, inner[0] if inner else owner


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections in a field's type, also as options or as elements."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)
