"""The section `response_format` of a spec, and `retry_invalid`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.answers_job import asking
from support.fake_job import write_job

from batchllm_operator.errors import SpecError
from batchllm_operator.spec import JobSpec, JsonSchemaFormat, load_spec

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


def form(schema: object = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, **more}


def of_properties(*names: str, **more: Any) -> dict[str, Any]:
    return form({"type": "object", "properties": {key: {} for key in names}}, **more)


@pytest.mark.parametrize("given", [SCHEMA, {"name": "answer", "strict": True, "schema": SCHEMA}])
def test_columns_come_in_the_schemas_order(given: dict[str, Any]) -> None:
    spec = asking("/lake", response_format=form(given, prefix_columns="my_"))
    assert spec.output_columns[:4] == ("generated_text", "my_b", "my_a", "finish_reason")
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert isinstance(spec.response_format, JsonSchemaFormat)
    assert spec.response_format.schema_fields == SCHEMA


@pytest.mark.parametrize(
    ("name", "text"), [("s.json", json.dumps(SCHEMA)), ("s.yaml", yaml.safe_dump(SCHEMA))]
)
def test_a_schema_in_a_file_becomes_part_of_the_spec(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / name).write_text(text)
    spec = load_spec(write_job(tmp_path, response_format=form(f"schemas/{name}")))
    assert isinstance(spec.response_format, JsonSchemaFormat)
    assert spec.response_format.schema_fields == SCHEMA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"json_schema: schema.json: can't be read"),
        ("{", r"json_schema: schema.json: not JSON"),
        ('{"type": "object", "type": "array"}', "'type' is given twice"),
        ("[1]", "must be an object of fields"),
        ('{"type": "array"}', "must be of type object at its top level"),
    ],
)
def test_a_file_without_a_schema_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "schema.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        load_spec(write_job(tmp_path, response_format=form("schema.json")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_format": {}}, "must be a section of fields with a type"),
        ({"response_format": "json"}, "must be a section of fields with a type"),
        ({"response_format": {"type": "json"}}, "type must be 'json_schema', 'choice', 'regex'"),
        ({"response_format": form("schema.json")}, "in a spec file the path of a .json"),
        ({"response_format": form({"type": "object"})}, "with properties"),
        ({"response_format": form({"type": "object", "properties": {}})}, "with properties"),
        ({"response_format": form(prefix="x")}, "did you mean prefix_columns"),
        ({"response_format": of_properties("")}, "empty name; set prefix_columns"),
        ({"response_format": of_properties("error")}, "another column 'error'.*set prefix_columns"),
        ({"response_format": of_properties("status")}, "another column 'status'"),
        ({"response_format": of_properties("ROW_KEY")}, "another column 'ROW_KEY'"),
        ({"response_format": of_properties("ds")}, "another column 'ds'"),
        ({"response_format": of_properties("a", "A")}, "another column 'A'"),
        (
            {
                "response_format": of_properties("query"),
                "output": {"uri": "/lake/out", "carry": ["query"]},
            },
            "another column 'query'",
        ),
        (
            {"response_format": of_properties("mean_logprob"), "sampling": {"logprobs": 0}},
            "another column 'mean_logprob'",
        ),
        ({"response_format": {"type": "choice", "choices": []}}, "choices: must not be empty"),
        ({"response_format": {"type": "choice", "choices": ["a", "a"]}}, "a choice twice"),
        ({"response_format": {"type": "choice", "choices": ["a", ""]}}, "must not be empty"),
        ({"response_format": {"type": "regex", "regex": "("}}, "isn't a regular expression"),
        ({"response_format": form(), "sampling": {"temperature": 1, "n": 2}}, "leave out sampl"),
        (
            {"response_format": form(), "task": "classify", "labels": ["a", "b"]},
            "is for task: generate",
        ),
        ({"retry_invalid": 1, "sampling": {"temperature": 1}}, "needs a response_format"),
        ({"retry_invalid": 1, "response_format": form()}, "a sampling.temperature above 0"),
        ({"retry_invalid": 11}, "at most 10"),
        ({"retry_invalid": -1}, "at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        asking("/lake", **changes)


@pytest.mark.parametrize("pattern", [r"\p{L}+", "(?<year>[0-9]{4})", r"[0-9]+(?=a)"])
def test_a_regex_is_in_the_syntax_of_python_or_rust(pattern: str) -> None:
    asking("/lake", response_format={"type": "regex", "regex": pattern})


def test_identity_knows_the_order_of_a_schemas_properties() -> None:
    backwards = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    formats = (form(), form(backwards))
    assert len({asking("/lake", response_format=each).identity for each in formats}) == 2
