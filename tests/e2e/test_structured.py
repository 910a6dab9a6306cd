"""Answers in a form are those of stock vLLM's `LLM.generate` with the same structured outputs."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from support.demo_job import Demo, snippet_prompt
from support.stock_vllm import WITHOUT_SPACES

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
    """The text of each row: greedy, sampled, and one of the choices."""
    prompts = [*map(snippet_prompt, demo.rows("d"))]
    forms = [(GREEDY, {"json": SCHEMA}), (SAMPLED, {"json": SCHEMA}), (GREEDY, {"choice": CHOICES})]
    asked = [
        {"prompts": prompts, "sampling": sampling, "structured_outputs": form}
        for sampling, form in forms
    ]
    return [[row[0][0] for row in job] for job in demo.stock("answers", asked)]


def run(demo: Demo, name: str, **changes: Any) -> pa.Table:
    (demo.folder / "schema.json").write_text(json.dumps(SCHEMA))
    engine = {"extra_args": {"structured_outputs_config": WITHOUT_SPACES}}
    job = demo.run_job(name, input=FIRST, engine=engine, max_failed_fraction=1.0, **changes)
    return job.table


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


def test_typed_columns_of_the_texts_of_stock_vllm(demo: Demo, stock: list[list[str]]) -> None:
    table = run(demo, "structured", sampling=GREEDY, response_format=FORM)
    assert table["generated_text"].to_pylist() == stock[0]
    assert [table.schema.field(name).type for name in SCHEMA["properties"]] == TYPES
    for row in table.to_pylist():
        check_columns(row)
        assert row["error"] is None


def test_all_that_end_are_valid_and_others_are_generated_again(
    demo: Demo, stock: list[list[str]]
) -> None:
    table = run(demo, "retried", sampling=SAMPLED, response_format=FORM, retry_invalid=1)
    num_invalid = 0
    for row, text in zip(table.to_pylist(), stock[1], strict=True):
        check_columns(row)
        if row["finish_reason"] == "stop":
            assert row["error"] is None
        num_invalid += not is_valid(text)
        assert (row["generated_text"] == text) == is_valid(text)
    assert 0 < num_invalid < table.num_rows


def test_choices(demo: Demo, stock: list[list[str]]) -> None:
    form = {"type": "choice", "choices": CHOICES}
    table = run(demo, "choices", sampling=GREEDY, response_format=form)
    assert table["generated_text"].to_pylist() == stock[2]
    assert table["error"].null_count == table.num_rows
    assert len(set(stock[2])) > 1
