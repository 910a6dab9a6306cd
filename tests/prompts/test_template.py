"""Rows to prompt texts, and the rows that can't become one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchllm_operator.prompts import PromptRenderer, RenderedPrompts
from batchllm_operator.spec import PromptSpec


def render(columns: dict[str, Any], template: str, **options: Any) -> RenderedPrompts:
    batch = pa.record_batch(columns)
    return PromptRenderer(PromptSpec(template=template, **options)).render(batch)


def texts(columns: dict[str, Any], template: str, **options: Any) -> list[str | None]:
    rendered = render(columns, template, **options)
    assert rendered.errors == [None] * len(rendered.texts)
    return rendered.texts


def test_columns_are_placed_row_by_row() -> None:
    columns = {"query": ["q0", "q1"], "doc": ["d0", "d1"], "unused": [None, 1]}
    assert texts(columns, "{doc}\n{query}|{doc}") == ["d0\nq0|d0", "d1\nq1|d1"]


def test_doubled_braces_are_literal_and_values_are_never_parsed() -> None:
    columns = {"q": ["{q}", "{{}}", "{0.__class__}", "%s\\n"]}
    assert texts(columns, '{{"q": "{q}"}}') == [
        '{"q": "{q}"}',
        '{"q": "{{}}"}',
        '{"q": "{0.__class__}"}',
        '{"q": "%s\\n"}',
    ]


@given(st.text(alphabet="ab {}!:.[", min_size=1, max_size=12), st.text(max_size=5))
def test_an_accepted_template_means_what_it_means_to_python(template: str, value: str) -> None:
    try:
        spec = PromptSpec(template=template)
    except ValidationError:
        return
    columns = {name: [value] for name in ("unused", *spec.columns)}
    expected = template.format_map(dict.fromkeys(spec.columns, value))
    [text] = PromptRenderer(spec).render(pa.record_batch(columns)).texts
    assert (text or "") == expected


@pytest.mark.parametrize(
    "text", ["Ünïcödé 表 🙂", "a\u0301", "\u202eright", "tab\tand\r\nlines", " "]
)
def test_text_is_placed_as_it_is(text: str) -> None:
    assert texts({"doc": [text]}, "{doc}") == [text]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_every_kind_of_string_column(kind: pa.DataType) -> None:
    column = pa.array(["x", None, "y", "x"]).cast(kind)
    rendered = render({"doc": column}, "<{doc}>")
    assert rendered.texts == ["<x>", None, "<y>", "<x>"]


def test_a_null_is_an_error_of_its_row_only() -> None:
    rendered = render({"a": ["x", None, "z"], "b": ["1", "2", None]}, "{a}{b}")
    assert rendered.texts == ["x1", None, None]
    assert rendered.errors[0] is None
    assert rendered.errors[1] == "null_value: column 'a' is null"
    assert rendered.errors[2] == "null_value: column 'b' is null"


def test_a_column_of_nulls() -> None:
    rendered = render({"doc": pa.nulls(2)}, "{doc}")
    assert rendered.errors == ["null_value: column 'doc' is null"] * 2


def test_text_that_is_not_utf8_is_an_error_of_its_row_only() -> None:
    """Parquet writers don't all check, and pyarrow doesn't when it reads."""
    broken = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xff\xfe")
    )
    rendered = render({"doc": broken}, "{doc}")
    assert rendered.texts == ["x", None]
    assert rendered.errors[0] is None
    assert rendered.errors[1] is not None
    assert "'doc'" in rendered.errors[1]


def test_no_text_is_an_error_whatever_the_system_text_says() -> None:
    for options in ({}, {"system": "Be brief."}, {"system": "Be brief.", "chat_template": True}):
        rendered = render({"doc": ["", "x"]}, "{doc}", **options)
        assert rendered.texts[0] is None
        assert rendered.errors[0] is not None
        assert rendered.errors[0].startswith("empty_prompt: ")
        assert rendered.errors[1] is None


def test_the_system_text_comes_first_as_it_is() -> None:
    system = 'Answer {"like": "this"}, {doc} {'
    assert texts({"doc": ["x"]}, "|{doc}", system=system) == [system + "|x"]


def test_the_chat_template_places_the_system_text_instead() -> None:
    assert texts({"doc": ["x"]}, "{doc}", system="Be brief.", chat_template=True) == ["x"]


def test_a_template_without_places_gives_every_row_the_same() -> None:
    assert texts({"doc": [None, "x"]}, "constant") == ["constant", "constant"]


def test_no_rows() -> None:
    rendered = render({"doc": pa.array([], pa.string())}, "{doc}")
    assert (rendered.texts, rendered.errors) == ([], [])
