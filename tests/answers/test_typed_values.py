"""Values of a schema's columns, and answers that they can't hold."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from support.answers_job import asking

from batchllm_operator.answers import Answers
from batchllm_operator.errors import SpecError

NAME = "value"


def columns_of(schema: dict[str, Any], **more: Any) -> Answers:
    whole = {"type": "object", "properties": {NAME: schema}, **more}
    form = {"type": "json_schema", "json_schema": whole}
    return Answers.of(asking("/lake", response_format=form))


def value_of(columns: Answers, value: object) -> Any:
    text = json.dumps({NAME: value})
    assert columns.fault(text, {}) is None
    outputs = pa.table({"generated_text": [text], "error": pa.nulls(1, pa.string())})
    return columns.columns(outputs)[NAME][0].as_py()


POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "kind", "value", "wanted"),
    [
        ({"type": "integer"}, pa.int64(), 3.0, 3),
        ({"type": "integer"}, pa.int64(), -(1 << 63), -(1 << 63)),
        ({"type": ["integer", "number"]}, pa.float64(), 3, 3.0),
        ({"type": ["string", "null"]}, pa.string(), None, None),
        ({"type": ["string", "integer"]}, pa.string(), 3, "3"),
        ({"const": "x"}, pa.string(), "x", "x"),
        ({"enum": [1, 2, None]}, pa.int64(), None, None),
        ({"enum": [1, 2.5]}, pa.float64(), 1, 1.0),
        ({"enum": [1, "a"]}, pa.string(), "a", '"a"'),
        ({"enum": [True, False]}, pa.bool_(), True, True),
        ({}, pa.string(), {"é": 1}, '{"é": 1}'),
        ({"type": "array"}, pa.string(), [1], "[1]"),
        ({"type": "array", "items": POINT}, pa.list_(pa.struct({"x": pa.float64()})), [], []),
        ({"oneOf": [POINT, {"type": "null"}]}, pa.struct({"x": pa.float64()}), {"x": 1}, {"x": 1}),
        ({"anyOf": [POINT, {"type": "string"}]}, pa.string(), "a", '"a"'),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, pa.struct({"x": pa.float64()}), None, None),
    ],
)
def test_types_and_values(
    schema: dict[str, Any], kind: pa.DataType, value: object, wanted: object
) -> None:
    columns = columns_of(schema, **{"$defs": {"a/b": {**POINT, "type": ["object", "null"]}}})
    assert columns.fields[0].type == kind
    assert value_of(columns, value) == wanted


def test_strings_may_hold_control_characters() -> None:
    columns = columns_of({"type": "string"})
    text = '{"value": "a\tb\x1fc\u0000"}'
    assert columns.fault(text, {}) is None
    outputs = pa.table({"generated_text": [text], "error": pa.nulls(1, pa.string())})
    assert columns.columns(outputs)[NAME].to_pylist() == ["a\tb\x1fc\0"]


@pytest.mark.parametrize(
    ("schema", "text", "reason"),
    [
        ({}, "", "isn't JSON: Expecting value at character 1"),
        ({}, '{"value": "abc', "isn't JSON: Unterminated string starting at at character 11"),
        ({}, '{"value": NaN}', "isn't JSON: NaN isn't a number in it"),
        ({}, '{"value": ' + "9" * 5000 + "}", "isn't JSON: a number is too long"),
        ({}, '{"value": ' + "[" * 100_000, "is nested too deeply"),
        ({}, "[]", "the answer doesn't meet the schema's 'type'"),
        ({"type": "integer"}, '{"value": "3"}', "value doesn't meet the schema's 'type'"),
        ({"type": "integer"}, '{"value": 9223372036854775808}', "value has more than 64 bits"),
        ({"type": "number"}, '{"value": 1e999}', "value is too large for a double"),
        ({"type": "number"}, '{"value": ' + "9" * 400 + "}", "value is too large for a double"),
        ({"type": "string"}, r'{"value": "\ud800"}', "value holds half a surrogate pair"),
        ({"type": "string", "format": "date"}, '{"value": "2026-02-30"}', "value isn't a date"),
        (
            {"type": "string", "format": "date-time"},
            '{"value": "2026-02-03T00:00:00"}',
            "value isn't a date and time with its offset from UTC",
        ),
        (
            {"type": "string", "format": "date-time"},
            '{"value": "0001-01-01T00:00:00+23:00"}',
            "value isn't a date and time",
        ),
        (
            {"type": "array", "items": POINT},
            '{"value": [{"x": 1}, {}]}',
            "value.1 doesn't meet the schema's 'required'",
        ),
    ],
)
def test_answers_that_do_not_fit(schema: dict[str, Any], text: str, reason: str) -> None:
    fault = columns_of(schema).fault(text, {})
    assert fault is not None
    assert str(fault).startswith(f"invalid_output: {reason}")


def test_a_schema_of_references_that_grows_without_end_is_refused() -> None:
    def pair(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {key: {"$ref": f"#/$defs/{name}"} for key in "xy"}}

    defs = {f"d{depth}": pair(f"d{depth + 1}") for depth in range(30)} | {"d30": {}}
    with pytest.raises(SpecError, match="more than 20,000 parts"):
        columns_of({"$ref": "#/$defs/d0"}, **{"$defs": defs})
    chain = {f"d{depth}": {"$ref": f"#/$defs/d{depth + 1}"} for depth in range(3000)}
    with pytest.raises(SpecError, match="nested too deeply"):
        columns_of({"$ref": "#/$defs/d0"}, **{"$defs": chain | {"d3000": {}}})


@pytest.mark.parametrize("name", ["default", "properties", "const"])
def test_properties_may_be_named_as_keywords(name: str) -> None:
    inner = {"type": "object", "properties": {name: {"$ref": "#/$defs/inner"}}}
    with pytest.raises(SpecError, match="contains itself"):
        columns_of(inner, **{"$defs": {"inner": inner}})
