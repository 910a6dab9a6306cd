"""JSON schemas as Arrow types, and JSON values as theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import pyarrow as pa

from batchllm_operator.answers.subschemas import BY_NAME, VALUES, target
from batchllm_operator.errors import SpecError
from batchllm_operator.spec.limits import shown

MAX_COLUMNS: Final = 2_000
"""Columns of a schema, with those inside structs and lists."""
_INT64: Final = 1 << 63


class ValueFaultError(ValueError):
    """A value that its column can't hold; the message doesn't repeat it."""


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """The column of a property."""

    type: pa.DataType
    convert: Callable[[Any], Any]
    """From a JSON value that isn't null to what Arrow takes; raises `ValueFaultError`."""

    def value(self, value: Any) -> Any:
        """What Arrow takes for a JSON value, null included."""
        return None if value is None else self.convert(value)


def property_columns(schema: Mapping[str, Any]) -> dict[str, JsonColumn]:
    """The columns of a schema's top-level properties, by name, in its order.

    Raises:
        SpecError: a property contains itself, refers to what isn't there, or there are too many.
    """
    try:
        reader = _SchemaReader(schema)
        return {name: reader.column(each, name) for name, each in schema["properties"].items()}
    except RecursionError:
        raise _refused("", "is nested too deeply") from None


class _SchemaReader:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_columns = 0
        self._finite: set[str] = set()
        for name, each in root["properties"].items():
            self._check_ends(each, name, ())
        self._check_ends(root, "", ())

    def _check_ends(self, schema: Any, where: str, inside: tuple[str, ...]) -> None:
        """Raise SpecError if a schema contains itself.

        Args:
            inside: the references that lead to it.
        """
        if isinstance(schema, list):
            for each in schema:
                self._check_ends(each, where, inside)
        if not isinstance(schema, dict):
            return
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in self._finite:
            if ref in inside or ref == "#":
                raise _refused(where, "contains itself, which no column can hold")
            self._check_ends(self._target(ref, where), where, (*inside, ref))
            self._finite.add(ref)
        if schema is not self._root and isinstance(schema.get("$id"), str):
            raise _refused(where, "has an $id, which only the whole schema may have")
        for name, each in schema.items():
            if name in ("$dynamicRef", "$recursiveRef"):
                raise _refused(where, f"uses {name}, which may contain itself")
            if name in BY_NAME and isinstance(each, dict):
                self._check_ends(list(each.values()), where, inside)
            elif name not in VALUES:
                self._check_ends(each, where, inside)

    def _target(self, ref: str, where: str) -> Any:
        """What a reference names: a JSON pointer from the schema's top."""
        if ref != "#" and not ref.startswith("#/"):
            raise _refused(where, f"refers to {shown(ref)!r}; only #/$defs/NAME works")
        try:
            return target(ref, self._root)
        except LookupError:
            raise _refused(where, f"refers to {shown(ref)!r}, which isn't in the schema") from None

    def column(self, schema: Any, where: str) -> JsonColumn:
        self._num_columns += 1
        if self._num_columns > MAX_COLUMNS:
            raise _refused(where, f"is one of more than {MAX_COLUMNS:,} columns")
        schema = self._plain(schema, where)
        kind = _kind(schema)
        if kind == "object" and isinstance(fields := schema.get("properties"), dict) and fields:
            parts = {name: self.column(each, f"{where}.{name}") for name, each in fields.items()}
            struct = pa.struct([(name, each.type) for name, each in parts.items()])
            return JsonColumn(struct, lambda value: _struct(parts, value))
        is_list = isinstance(schema.get("items"), dict) and "prefixItems" not in schema
        if kind == "array" and is_list:
            item = self.column(schema["items"], f"{where}[]")
            return JsonColumn(pa.list_(item.type), lambda values: [*map(item.value, values)])
        return _SCALARS.get(kind, _JSON)

    def _plain(self, schema: Any, where: str) -> dict[str, Any]:
        """A schema without references, and without the option of null."""
        if not isinstance(schema, dict):  # true
            return {}
        if "$ref" in schema:
            target = self._target(schema["$ref"], where)
            rest = {name: each for name, each in schema.items() if name != "$ref"}
            return self._plain({**target, **rest} if isinstance(target, dict) else rest, where)
        if "type" in schema:
            return schema
        for name in ("anyOf", "oneOf", "allOf"):
            options = [each for each in schema.get(name, ()) if not _is_null(each)]
            if len(options) == 1:
                return self._plain(options[0], where)
        return schema


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (
        schema.get("type") == "null" or ("const" in schema and schema["const"] is None)
    )


def _kind(schema: Mapping[str, Any]) -> str | None:
    """A type's name, `date-time` or `date`; None for what only JSON can hold."""
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named or ())
    if not kinds:
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        kinds = {_kind_of(each) for each in values}
    kinds -= {"null"}
    if kinds == {"integer", "number"}:
        return "number"
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    is_time = kind == "string" and schema.get("format") in ("date", "date-time")
    return str(schema["format"]) if is_time else str(kind)


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return kinds.get(type(value), "json")


def _refused(where: str, reason: str) -> SpecError:
    place = f"property {shown(where)!r} " if where else ""
    return SpecError(f"response_format.json_schema: {place}{reason}")


def _struct(parts: Mapping[str, JsonColumn], value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.value(value.get(name)) for name, part in parts.items()}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueFaultError("holds half a surrogate pair, which is no character") from None
    return value


def _integer(value: float) -> int:
    if not -_INT64 <= value < _INT64:
        raise ValueFaultError("has more than 64 bits")
    return int(value)


def _number(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueFaultError("is too large for a double")
    return number


def _time(value: str) -> datetime:
    try:
        time = datetime.fromisoformat(value)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueFaultError("isn't a date and time with its offset from UTC")


def _date(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueFaultError("isn't a date") from None


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False))


_SCALARS: Final[Mapping[str | None, JsonColumn]] = {
    "string": JsonColumn(pa.string(), _text),
    "integer": JsonColumn(pa.int64(), _integer),
    "number": JsonColumn(pa.float64(), _number),
    "boolean": JsonColumn(pa.bool_(), bool),
    "date-time": JsonColumn(pa.timestamp("us", "UTC"), _time),
    "date": JsonColumn(pa.date32(), _date),
}
_JSON: Final = JsonColumn(pa.string(), _json)
