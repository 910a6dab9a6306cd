"""Rows that are whole chats: from turns, or from a column of messages."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prompts.test_tokenizer import CHAT_TEMPLATE, END, START, build_tokenizer, job

from batchllm_operator.errors import ModelError
from batchllm_operator.prompts import RenderedPrompts, has_messages
from batchllm_operator.prompts import load_tokenizer as load
from batchllm_operator.prompts.chats import ChatRenderer
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

DS = "2026-01-31"
USER = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": null}'}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}"
)
FULL = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{{ style }}"
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name }}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{{ m.other }}\n{% endfor %}"
)


def chats(prompt: dict[str, Any], columns: dict[str, Any]) -> RenderedPrompts:
    spec = job("/model", template=None, **prompt)
    return ChatRenderer(spec.prompt).render(pa.record_batch(columns))


def messages(*values: Any, **prompt: Any) -> RenderedPrompts:
    """Rendered chats of a column of JSON; a value that isn't text is written as JSON."""
    texts = [each if isinstance(each, str | None) else json.dumps(each) for each in values]
    return chats({"messages": "chat", **prompt}, {"chat": pa.array(texts, pa.string())})


def found(rendered: RenderedPrompts) -> list[Any]:
    return [text and json.loads(text) for text in rendered.texts.to_pylist()]


def rendered_by(spec: JobSpec, batch: pa.RecordBatch, ds: str = DS) -> RenderedPrompts:
    return load(spec, ds).renderer(spec.prompt).render(batch)


def texts_of(spec: JobSpec, rows: list[Any], ds: str = DS) -> list[Any]:
    """The texts that the chat template gives to rows of a JSON column."""
    batch = pa.record_batch({"chat": [json.dumps(row) for row in rows]})
    texts: list[Any] = rendered_by(spec, batch, ds).texts.to_pylist()
    return texts


def chat_job(folder: Path, template: str, **prompt: Any) -> JobSpec:
    model = build_tokenizer(folder, chat_template=template)
    return job(model, template=None, **{"messages": "chat", **prompt})


def test_turns_place_columns_and_keep_what_looks_like_json() -> None:
    turns = [
        {"role": "system", "template": "About {topic}."},
        {"role": "user", "template": 'Say "{{{word}}}"'},
        {"role": "assistant", "template": "Yes."},
        {"role": "user", "template": "{number}"},
    ]
    columns = {"topic": ["a", 'b"}', None], "word": ["x", "\n", "y"], "number": [1, 2, 3]}
    rendered = chats({"turns": turns}, columns)
    assert found(rendered)[1] == [
        {"role": "system", "content": 'About b"}.'},
        {"role": "user", "content": 'Say "{\n}"'},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "2"},
    ]
    assert found(rendered)[2] is None
    assert rendered.errors == {2: RowError("null_value", "column 'topic' is null")}


def test_a_turn_without_text_fails_its_row() -> None:
    turns = [{"role": "user", "template": "{a}"}, {"role": "user", "template": "{b}"}]
    rendered = chats({"turns": turns}, {"a": ["x", ""], "b": ["", "y"]})
    assert found(rendered) == [None, None]
    assert set(rendered.errors) == {0, 1}
    assert str(rendered.errors[0]).startswith("empty_prompt")


def test_structs_lose_fields_that_are_null_and_json_keeps_its_own() -> None:
    rows = [
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        [{**USER, "name": "ann"}, {"role": "tool", "content": "4", "tool_call_id": "1"}],
        None,
    ]
    call = [{**CALL, "function": {"name": "look", "arguments": {"a": None}}}]
    wanted = [[USER, {"role": "assistant", "tool_calls": call}], rows[1], None]
    rendered = chats({"messages": "chat"}, {"chat": pa.array(rows)})
    assert found(rendered) == wanted
    assert rendered.errors == {2: RowError("null_value", "column 'chat' is null")}
    assert found(messages(*rows)) == wanted


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_the_system_message_comes_first_where_the_chat_has_none(role: str) -> None:
    first = {"role": role, "content": "own"}
    wanted = [{"role": "system", "content": "Be brief."}] if role == "user" else []
    [[*head, message]] = found(messages([first], system="Be brief."))
    assert head == wanted
    assert message["content"] == "own"


def test_turns_get_the_system_message() -> None:
    turns = [{"role": "user", "template": "{a}"}]
    [chat] = found(chats({"turns": turns, "system": "{a}"}, {"a": ["x"]}))
    assert chat == [{"role": "system", "content": "{a}"}, {"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "has no messages"),
        ({}, "isn't a list of messages"),
        (USER, "isn't a list of messages"),
        ("null", "isn't a list of messages"),
        ("", "isn't JSON: Expecting value"),
        ("hello", "isn't JSON"),
        ('[{"role": "user", "content": "x"}', "isn't JSON"),
        ("[" * 100_000, "too deep"),
        ("[" + "1" * 5000 + "]", "thousands of digits"),
        (["hello"], "message 1 isn't an object"),
        ([None], "message 1 isn't an object"),
        ([USER, {"content": "x"}], "message 2 has no role; roles are system, user"),
        ([{"role": "bot", "content": "x"}], "message 1 has the role 'bot'; roles are"),
        ([{"role": ["user"], "content": "x"}], "message 1 has the role"),
        ([{"role": "x" * 5000, "content": "x"}], "message 1 has the role 'xxx"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "assistant", "content": None}], "message 1 has no content"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "message 1 has no content"),
        ([{"role": "user", "content": 5}], "message 1 has a content that isn't text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "a part of type 'None'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part without text"),
        ([{"role": "assistant", "tool_calls": "look"}], "tool_calls that aren't a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "look"}]}], "tool_calls that aren't"),
        ('[{"role": "user", "content": "\\ud800"}]', "half a surrogate pair"),
        ('[{"role": "assistant", "content": "", "reasoning": NaN}]', "holds NaN"),
    ],
)
def test_what_is_no_chat_fails_its_row_only(row: Any, reason: str) -> None:
    rendered = messages([USER], row, [USER])
    assert found(rendered) == [[USER], None, [USER]]
    [(number, error)] = rendered.errors.items()
    assert number == 1
    assert str(error).startswith("invalid_messages: column 'chat' ")
    assert reason in str(error)
    assert len(str(error)) < 300


def test_text_that_is_not_utf8_fails_its_row_only() -> None:
    broken = pa.array([b"x", b"\xff"]).view(pa.string())
    roles = pa.array(["user", "user"])
    structs = pa.StructArray.from_arrays([roles, broken], ["role", "content"])
    column = pa.ListArray.from_arrays([0, 1, 2], structs)
    for chat in (column, pa.array([json.dumps([USER]).encode(), b"\xff"]).view(pa.string())):
        rendered = chats({"messages": "chat"}, {"chat": chat})
        assert list(rendered.errors) == [1]
        assert str(rendered.errors[1]).startswith("not_utf8: column 'chat' ")


@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        (pa.string(), True),
        (pa.json_(), True),
        (pa.dictionary(pa.int8(), pa.large_string()), True),
        (pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), True),
        (pa.list_(pa.struct({"role": pa.string()})), False),
        (pa.list_(pa.struct({"role": pa.string(), "content": pa.binary()})), False),
        (pa.list_(pa.string()), False),
        (pa.struct({"role": pa.string(), "content": pa.string()}), False),
        (pa.int64(), False),
    ],
)
def test_column_types(kind: pa.DataType, is_taken: bool) -> None:
    assert has_messages(kind) == is_taken


def test_the_template_gets_messages_arguments_and_tools(tmp_path: Path) -> None:
    spec = chat_job(tmp_path, FULL, chat_template_kwargs={"style": "Z"}, tools=[TOOL])
    rows = [
        [{**USER, "name": "ann", "other": "dropped"}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        [{"role": "tool", "content": "4", "tool_call_id": "c1"}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
    ]
    head = f"{json.dumps([TOOL])}\nZ"
    tokenizer = load(spec, DS)
    texts = texts_of(spec, rows)
    assert texts == [
        head + "[user ann] hello\n",
        head + '[user] hello\n[assistant] {"a": null}\n',
        head + "[tool] 4c1\n",
        head + "[user] a\nb\n",
    ]
    [ids, *_] = tokenizer.encode(texts).to_lists()
    assert tokenizer.decode(ids) == texts[0]


def test_a_template_that_loops_over_parts_gets_them(tmp_path: Path) -> None:
    loop = "{% for part in m.content %}<{{ part.text }}>{% endfor %}"
    template = f"{{% for m in messages %}}{loop}{{% endfor %}}"
    spec = chat_job(tmp_path, template)
    rows = [[USER], [{"role": "assistant", "tool_calls": [CALL]}]]
    assert texts_of(spec, rows) == ["<hello>", ""]


def test_developers_are_the_system_to_templates_that_do_not_know_them(tmp_path: Path) -> None:
    spec = chat_job(tmp_path, CHAT_TEMPLATE)
    rows = [
        [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}],
        [{"role": "developer", "content": "b"}, USER],
    ]
    assert texts_of(spec, rows) == [
        f"{START}system\n{system}{END}\n{START}user\nhello{END}\n{START}assistant\n"
        for system in ("a\n\nb", "b")
    ]


def test_a_chat_that_the_template_refuses_fails_its_row_only(tmp_path: Path) -> None:
    spec = chat_job(tmp_path, STRICT)
    batch = pa.record_batch({"chat": [json.dumps(row) for row in ([USER], [USER, USER], [USER])]})
    rendered = rendered_by(spec, batch)
    assert rendered.texts.to_pylist() == ["user: hello\n", None, "user: hello\n"]
    assert rendered.errors == {
        1: RowError(
            "invalid_messages",
            "the model's chat template refuses them: roles must alternate",
        )
    }


def test_turns_whose_roles_the_template_refuses_are_refused_at_once(tmp_path: Path) -> None:
    turns = [{"role": "user", "template": "{a}"}] * 2
    with pytest.raises(ModelError, match=r"prompt\.turns: .*roles must alternate"):
        load(chat_job(tmp_path, STRICT, messages=None, turns=turns), DS)


def test_a_date_that_no_partition_has_is_the_models_fault_not_the_rows(tmp_path: Path) -> None:
    spec = chat_job(tmp_path, "{{ strftime_now('%Y') }}{{ messages[0].content }}")
    assert texts_of(spec, [[USER]]) == ["2026hello"]
    with pytest.raises(ModelError, match="asks for the date"):
        texts_of(spec, [[USER]], "latest")
