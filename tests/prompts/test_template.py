"""Rows to prompt texts, and the rows that can't become one."""

from __future__ import annotations

from string import Formatter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchllm_operator.prompts import PromptRenderer, RenderedPrompts
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import PromptSpec


def render(columns: dict[str, Any], template: str, **options: Any) -> RenderedPrompts:
    batch = pa.record_batch(columns)
    return PromptRenderer(PromptSpec(template=template, **options)).render(batch)


UNICODE = ["Ünïcödé 表 🙂", "a\u0301", "\u202eright", "tab\tand\r\nlines", " "]
SYSTEM = 'Answer {"like": "this"}, {doc} {'
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], list[str]]] = {
    "row by row": (
        {"query": ["q0", "q1"], "doc": ["d0", "d1"], "unused": [None, 1]},
        "{doc}\n{query}|{doc}",
        {},
        ["d0\nq0|d0", "d1\nq1|d1"],
    ),
    "doubled braces are literal, values are never parsed": (
        {"q": ["{q}", "{{}}", "{0.__class__}", "%s\\n"]},
        '{{"q": "{q}"}}',
        {},
        ['{"q": "{q}"}', '{"q": "{{}}"}', '{"q": "{0.__class__}"}', '{"q": "%s\\n"}'],
    ),
    "text as it is": ({"doc": UNICODE}, "{doc}", {}, UNICODE),
    "the system text first": ({"doc": ["x"]}, "|{doc}", {"system": SYSTEM}, [SYSTEM + "|x"]),
    "the chat template places the system text": (
        {"doc": ["x"]},
        "{doc}",
        {"system": "Be brief.", "chat_template": True},
        ["x"],
    ),
    "no places": ({"doc": [None, "x"]}, "constant", {"constant": True}, ["constant"] * 2),
    "a column's name with a dot, no fields of a value": (
        {"q.id": ["a", "b"], "q": ["x", "y"], "a[0]": ["1", "2"]},
        "{q.id}|{q}|{a[0]}",
        {},
        ["a|x|1", "b|y|2"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_are_placed(case: str) -> None:
    columns, template, options, expected = CASES[case]
    rendered = render(columns, template, **options)
    assert rendered.errors == {}
    assert rendered.present() == rendered.texts.to_pylist() == expected


@given(st.text(alphabet="ab {}!:.[", min_size=1, max_size=12), st.text(max_size=5))
def test_an_accepted_template_means_what_it_means_to_python(template: str, value: str) -> None:
    try:
        spec = PromptSpec(template=template, constant=True)
    except ValidationError:
        return
    columns = {name: [value] for name in ("unused", *spec.columns)}
    parsed = Formatter().parse(template)
    expected = "".join(literal + ("" if name is None else value) for literal, name, *_ in parsed)
    rendered = PromptRenderer(spec).render(pa.record_batch(columns))
    assert rendered.present() == ([expected] if expected else [])


def test_a_null_is_an_error_of_its_row_only() -> None:
    rendered = render({"a": ["x", None, "z"], "b": ["1", "2", None]}, "{a}{b}")
    assert rendered.texts.to_pylist() == ["x1", None, None]
    assert rendered.present() == ["x1"]
    assert rendered.errors == {
        1: RowError("null_value", "column 'a' is null"),
        2: RowError("null_value", "column 'b' is null"),
    }


@pytest.mark.parametrize(
    "value",
    [b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe4\xb8", b"\xff"],
    ids=["half a surrogate pair", "overlong", "beyond Unicode", "cut", "no byte of UTF-8"],
)
def test_what_python_calls_no_text_is_none(value: bytes) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0" + len(value).to_bytes(4, "little"))
    rendered = render(
        {"doc": pa.StringArray.from_buffers(1, offsets, pa.py_buffer(value))}, "{doc}"
    )
    assert rendered.present() == [] and list(rendered.errors) == [0]


def test_a_value_with_a_fault_comes_before_a_null_of_a_later_column() -> None:
    rendered = render({"a": [float("nan"), 1.5], "b": [None, "x"]}, "{a}{b}")
    assert rendered.texts.to_pylist() == [None, "1.5x"]
    assert str(rendered.errors[0]).startswith("not_finite: column 'a' ")


def test_no_text_is_an_error_whatever_the_system_text_says() -> None:
    for options in ({}, {"system": "Be brief."}, {"system": "Be brief.", "chat_template": True}):
        rendered = render({"doc": ["", "x"]}, "{doc}", **options)
        assert rendered.texts.is_valid().to_pylist() == [False, True]
        assert list(rendered.errors) == [0]
        assert str(rendered.errors[0]).startswith("empty_prompt: ")


def test_errors_are_in_the_order_of_their_rows() -> None:
    rendered = render({"doc": ["", None, "x", "", None]}, "{doc}")
    assert [(row, error.kind) for row, error in rendered.errors.items()] == [
        (0, "empty_prompt"), (1, "null_value"), (3, "empty_prompt"), (4, "null_value")
    ]  # fmt: skip
