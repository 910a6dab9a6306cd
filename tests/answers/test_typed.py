"""Jobs whose answers have a form: typed columns and their values, choices, patterns; retries."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.answers_job import PROPERTIES, SCHEMA, TYPED, asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table
from support.lake_tables import LAKES

from batchllm_operator.answers import Answers, FakePrompt
from batchllm_operator.answers.fakes import digest_of
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job

SAMPLED = {"temperature": 1.0, "seed": 5}


def fake(**arguments: Any) -> dict[str, Any]:
    extra_args = {"byte_tokens": True, **arguments}
    return {"backend": "fake", "max_model_len": 4096, "extra_args": extra_args}


def answer_to(row: dict[str, Any]) -> str:
    """The fake engine's answer to a row."""
    prompt = list(expected_prompt(row).encode())
    text, _ = Answers.of(asking("/lake", response_format=TYPED)).fake(FakePrompt(prompt, 0))
    return text


def is_hit(row: dict[str, Any], every: int) -> bool:
    return digest_of(list(expected_prompt(row).encode())) % every == 0


def test_another_schema_reuses_nothing_but_another_prefix_does(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    run_and_commit(asking(tmp_path, response_format=TYPED, reuse_outputs=True))

    def num_reused(form: dict[str, Any]) -> int:
        output = {"uri": str(tmp_path / "out"), "add_columns": True}
        spec = asking(tmp_path, response_format=form, reuse_outputs=True, output=output)
        return plan_job(spec, DS).manifest.counts.num_reused_rows

    properties = dict(reversed(PROPERTIES.items()))  # the model writes them in another order
    other = {**TYPED, "json_schema": {**SCHEMA, "properties": properties}}
    assert num_reused(other) == 0
    assert num_reused({**TYPED, "prefix_columns": "answer_"}) == 6


def test_an_invalid_answer_is_a_row_error_with_its_text(tmp_path: Path) -> None:
    rows = document_rows(4, 3)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        engine=fake(invalid_every=3),
        max_failed_fraction=1,
        reuse_outputs=True,
    )
    plan = run_and_commit(spec)
    num_invalid = 0
    for found, row in zip(published(spec), rows, strict=True):
        if is_hit(row, 3):
            num_invalid += 1
            assert found["status"] == found["error"]["kind"] == "invalid_output"
            assert found["error"]["message"].startswith("isn't JSON: ")
            assert json.loads(answer_to(row))["summary"] not in found["error"]["message"]
            assert answer_to(row).startswith(found["generated_text"])
            assert all(found[name] is None for name in PROPERTIES)
            assert found["finish_reason"] == "length"
        else:
            assert found["error"] is None and found["generated_text"] == answer_to(row)
    assert 0 < num_invalid < len(rows)
    again = plan_job(spec.model_copy(update={"on_empty": "commit"}), DS)
    assert again.manifest.counts.num_reused_rows == len(rows) - num_invalid
    assert plan.manifest.counts.num_reused_rows == 0


def test_invalid_rows_are_generated_again_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = document_rows(6, 4)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        sampling=SAMPLED,
        retry_invalid=2,
        engine=fake(invalid_every=3, invalid_tries=2, max_in_flight=4),
        planner={"num_shards": 2},
    )
    with caplog.at_level(logging.INFO):
        run_and_commit(spec)
    for found, row in zip(published(spec), rows, strict=True):
        assert found["error"] is None and found["generated_text"] == answer_to(row)
    num_hit = sum(is_hit(row, 3) for row in rows)
    said = [each.args for each in caplog.records if each.message.startswith("retry_invalid")]
    assert num_hit > 1
    assert sum(int(str(times).split()[0]) for times, _ in said) == 2 * num_hit  # type: ignore[misc]


def test_a_row_that_stays_invalid_is_given_up(tmp_path: Path) -> None:
    rows = document_rows(3, 2)
    write_table(tmp_path / "documents", rows)
    spec = asking(
        tmp_path,
        response_format=TYPED,
        sampling=SAMPLED,
        retry_invalid=1,
        engine=fake(invalid_every=2, invalid_tries=2),
        max_failed_fraction=1,
    )
    plan = run_and_commit(spec)
    found = {row["row_key"]: row for row in published(spec)}
    for row in rows:
        error = found[row["row_key"]]["error"]
        assert (error is not None) == is_hit(row, 2)
    commit_run(plan.folder.uri)  # once more: nothing is left to do


@pytest.mark.parametrize(
    "form",
    [
        {
            "type": "json_schema",
            "json_schema": {"type": "object", "properties": {"a": {"pattern": r"^\p{L}+$"}}},
        },
        {"type": "regex", "regex": r"\{\"a\": \"\p{L}+\"\}"},
    ],
)
def test_a_pattern_that_python_lacks_checks_answers(tmp_path: Path, form: dict[str, Any]) -> None:
    answers = Answers.of(asking(tmp_path, response_format=form))
    assert answers.fault('{"a": "Ärger"}', {}) is None
    for wrong in ('{"a": "4"}', '{"a": "Ä4"}', '{"a": "Ä"} ' * 2):
        assert str(answers.fault(wrong, {})).startswith("invalid_output: ")


# Refused at plan


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"child": {"$ref": "#"}}, "property 'child' contains itself"),
        (
            {"tree": {"type": "array", "items": {"$ref": "#/properties/tree"}}},
            "property 'tree' contains itself",
        ),
        ({"far": {"$ref": "https://example.org/schema"}}, "property 'far' refers to"),
        ({"gone": {"$ref": "#/$defs/gone"}}, "'gone' refers to '#/\\$defs/gone', which isn't"),
        ({"odd": {"type": "strin"}}, "isn't a JSON schema: properties.odd.type"),
        ({"odd": {"pattern": "("}}, r"properties\.odd\.pattern: '\(' isn't a regular expression"),
        ({"odd": {"patternProperties": {r"\p{L}": {}}}}, r"properties\.odd: patternProperties: "),
        ({"a": {"type": "object", "properties": {"x": {}, "X": {}}}}, "differ by case only"),
        ({"a": {"type": "object", "properties": {"": {}}}}, "without a name in 'a'"),
    ],
)
def test_schemas_that_are_no_columns_are_refused(
    tmp_path: Path, properties: dict[str, Any], message: str
) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": properties}}
    with pytest.raises(SpecError, match=message):
        plan_job(asking(tmp_path, response_format=form), DS)


@pytest.mark.parametrize(
    "properties",
    [{"first name": {}}, {"who": {"type": "object", "properties": {"a=b": {"type": "string"}}}}],
)
def test_delta_refuses_names_that_it_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any]
) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": properties}}
    target = LAKES["delta"](str(tmp_path), tmp_path, monkeypatch, "out")
    output = {"uri": target.address, "staging_uri": target.staging}
    with pytest.raises(SpecError, match=r"the name '(first name|who.a=b)' has '[ =]'"):
        plan_job(asking(tmp_path, response_format=form, output=output), DS)
    plan_job(asking(tmp_path, response_format=form), DS)  # Parquet holds it


# Values of a schema's columns, and answers that they can't hold


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
