"""JSON schemas as Arrow types, and JSON values as theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import pyarrow as pa

from batchllm_operator.answers.subschemas import refused

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

    Args:
        schema: without references; see `resolved`.

    Raises:
        SpecError: there are too many.
    """
    num_columns = 0

    def column(schema: Any, where: str) -> JsonColumn:
        nonlocal num_columns
        num_columns += 1
        if num_columns > MAX_COLUMNS:
            raise refused(where, f"is one of more than {MAX_COLUMNS:,} columns")
        schema = _plain(schema)
        kind = _kind(schema)
        if kind == "object" and isinstance(fields := schema.get("properties"), dict) and fields:
            parts = {name: column(part, f"{where}.{name}") for name, part in fields.items()}
            struct = pa.struct([(name, part.type) for name, part in parts.items()])
            return JsonColumn(struct, lambda value: _struct(parts, value))
        is_list = isinstance(schema.get("items"), dict) and "prefixItems" not in schema
        if kind == "array" and is_list:
            item = column(schema["items"], f"{where}[]")
            return JsonColumn(pa.list_(item.type), lambda values: [*map(item.value, values)])
        return _SCALARS.get(kind, _JSON)

    return {name: column(part, name) for name, part in schema["properties"].items()}


def _plain(schema: Any) -> dict[str, Any]:
    """A schema without the option of null."""
    if not isinstance(schema, dict):  # true
        return {}
    for name in ("anyOf", "oneOf", "allOf") if "type" not in schema else ():
        options = [option for option in schema.get(name, ()) if not _is_null(option)]
        if len(options) == 1:
            return _plain(options[0])
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
        kinds = set(map(_kind_of, values))
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
