"""Rows to prompt texts, and rows that can't become one; no text and no template can do more."""

from pathlib import Path
from string import Formatter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompts.test_tokenizer import CHAT_TEMPLATE, END, START, build_tokenizer, ids_of, job
from pydantic import ValidationError

from batchllm_operator.errors import ModelError
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


# Text of rows in a chat template, and chat templates of models: neither can do anything


HOSTILE = [
    *("{{ 7 * 7 }}", "{% for x in messages %}{{ x }}{% endfor %}", "{# gone #}", "{{ messages }}"),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{doc}", "{0.__class__}", "%(doc)s"),
    *("${HOME}", "$(id)", "`id`", "'; DROP TABLE t; --", "</s>", "\u202e"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("model"))


def test_a_chat_template_places_the_text_of_a_row_and_does_not_read_it(model: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model)
    system = "\n".join(HOSTILE)
    spec = job(model, chat_template=True, system=system)
    for text, ids in zip(HOSTILE, ids_of(spec, HOSTILE), strict=True):
        expected = f"{START}system\n{system}{END}\n{START}user\n{text}{END}\n{START}assistant\n"
        assert own.decode(ids) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "messages.append(1)",
    ],
)
def test_a_models_chat_template_runs_in_a_sandbox(tmp_path: Path, expression: str) -> None:
    template = CHAT_TEMPLATE + "{{ " + expression + " }}"
    folder = build_tokenizer(tmp_path / "model", chat_template=template)
    with pytest.raises(ModelError, match="its chat template refuses the prompt"):
        ids_of(job(folder, chat_template=True), ["text"])
