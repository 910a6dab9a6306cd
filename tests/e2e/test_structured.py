"""Answers in a form fit it, and are those of stock vLLM with the same structured outputs."""

import json
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from support.demo_job import Demo, snippet_prompt
from support.stock_vllm import WITHOUT_SPACES

# vLLM calls xgrammar as older ones want it, in this process, where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated")
FIRST = {"filter": [{"column": "package", "op": "<", "value": "d"}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "price": {"type": "number", "minimum": 0, "maximum": 100},
        "kind": {"enum": ["bug", "feature", "question"]},
        "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 6},
    },
    "required": ["title", "stars", "price", "kind", "open", "tags"],
    "additionalProperties": False,
}
TYPES = [pa.string(), pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.list_(pa.string())]
GREEDY = {"max_tokens": 128, "temperature": 0.0}
SAMPLED = {"max_tokens": 66, "temperature": 1.0, "seed": 11}
CHOICES = ["relevant", "partly relevant", "irrelevant"]
FORM = {"type": "json_schema", "json_schema": "schema.json"}


@pytest.fixture(scope="module")
def stock(demo: Demo) -> list[list[str]]:
    """The text of each row: sampled, and one of the choices."""
    prompts = [*map(snippet_prompt, demo.rows("d"))]
    forms = [(SAMPLED, {"json": SCHEMA}), (GREEDY, {"choice": CHOICES})]
    asked = [
        {"prompts": prompts, "sampling": sampling, "structured_outputs": form}
        for sampling, form in forms
    ]
    return [[row[0][0] for row in job] for job in demo.stock("answers", asked)]


def run(demo: Demo, name: str, **changes: Any) -> pa.Table:
    (demo.folder / "schema.json").write_text(json.dumps(SCHEMA))
    engine = {"extra_args": {"structured_outputs_config": WITHOUT_SPACES}}
    fields = {"input": FIRST, "engine": engine, "max_failed_fraction": 1.0}
    return demo.run_job(name, **{**fields, **changes}).table


def parsed(text: str) -> Any:
    """Its JSON value; xgrammar lets control characters into strings."""
    return json.loads(text, strict=False)


def is_valid(text: str) -> bool:
    try:
        jsonschema.validate(parsed(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def check_columns(row: dict[str, Any]) -> None:
    """The row's columns are its text's properties, if it is valid."""
    text = row["generated_text"]
    wanted = parsed(text) if is_valid(text) else dict.fromkeys(SCHEMA["properties"])
    assert {name: row[name] for name in wanted} == wanted
    assert (row["error"] is None) == is_valid(text)
    assert row["error"] is None or row["error"]["kind"] == "invalid_output"


def test_answers_of_trained_weights_fit_the_schema(real: Demo) -> None:
    """With the engine's own settings, so that the model may write spaces."""
    few = {"filter": [{"column": "query", "value": "What is it about?"}]}
    form = {"sampling": GREEDY, "response_format": FORM}
    table = run(real, "structured", input=few, engine={}, **form)
    assert [table.schema.field(name).type for name in SCHEMA["properties"]] == TYPES
    for row in table.to_pylist():
        if row["error"] is None or row["error"]["kind"] != "null_value":
            check_columns(row)
            assert row["error"] is None
    assert len(set(table["title"].to_pylist())) > 3


def test_all_that_end_are_valid_and_others_are_generated_again(
    demo: Demo, stock: list[list[str]]
) -> None:
    table = run(demo, "retried", sampling=SAMPLED, response_format=FORM, retry_invalid=1)
    num_invalid = 0
    for row, text in zip(table.to_pylist(), stock[0], strict=True):
        check_columns(row)
        if row["finish_reason"] == "stop":
            assert row["error"] is None
        num_invalid += not is_valid(text)
        assert (row["generated_text"] == text) == is_valid(text)
    assert 0 < num_invalid < table.num_rows


def test_choices(demo: Demo, stock: list[list[str]]) -> None:
    form = {"type": "choice", "choices": CHOICES}
    table = run(demo, "choices", sampling=GREEDY, response_format=form)
    assert table["generated_text"].to_pylist() == stock[1]
    assert table["error"].null_count == table.num_rows
    assert len(set(stock[1])) > 1
