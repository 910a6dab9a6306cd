"""Jobs whose rows are chats. Without a model, the tokens are the bytes of a chat's JSON."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, write_table
from support.lake_tables import Lake

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.advise import advise
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec, parse_spec_json

USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "yes?"}
TURNS = [{"role": "user", "template": "{document}"}, {"role": "user", "template": "{query}"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d"}}]
BAD = {
    "roles": '[{"role": "bot", "content": "x"}]',
    "empty": "[]",
    "null": None,
    "no JSON": "hello",
    "no list": '{"role": "user", "content": "x"}',
}


def chatting(folder: Path | str, **changes: Any) -> JobSpec:
    prompt = changes.pop("prompt", {"messages": "chat"})
    return asking(folder, **{"output": {"uri": f"{folder}/out"}, "prompt": prompt, **changes})


def prompt_of(*messages: dict[str, Any]) -> list[int]:
    return list(json.dumps(messages, ensure_ascii=False).encode())


def rows_of(chats: list[Any]) -> list[dict[str, Any]]:
    return [{"row_key": f"{idx:03}", "chat": chat} for idx, chat in enumerate(chats)]


@pytest.mark.parametrize("is_json", [False, True])
def test_every_format_holds_chats(lakes: tuple[Lake, Lake], is_json: bool, tmp_path: Path) -> None:
    source, target = lakes
    chats = [[USER], [USER, REPLY, {**USER, "name": "ann"}], [USER, REPLY, USER]]
    given = list(map(json.dumps, chats)) if is_json else chats
    source.append(DS, pa.Table.from_pylist(rows_of(given)))
    spec = chatting(
        tmp_path,
        input={"uri": source.address, "key": "row_key"},
        output={"uri": target.address, "staging_uri": target.staging},
    )
    run_and_commit(spec)
    texts = {row["row_key"]: row["generated_text"] for row in published(spec)}
    assert texts == {f"{idx:03}": fake_text(prompt_of(*chat)) for idx, chat in enumerate(chats)}


def test_rows_that_hold_no_chat_have_an_error(tmp_path: Path) -> None:
    chats = [json.dumps([USER]), *BAD.values()]
    write_table(tmp_path / "documents", rows_of(chats))
    spec = chatting(tmp_path, max_failed_fraction=0.9)
    plan = run_and_commit(spec)
    assert plan.manifest.counts.num_rejected_rows == len(BAD)
    good, *bad = published(spec)
    assert good["generated_text"] == fake_text(prompt_of(USER))
    codes = [row["error"]["kind"] for row in bad]
    assert codes == ["null_value" if each is None else "invalid_messages" for each in BAD.values()]
    assert all(
        "column 'chat'" in row["error"]["message"] and row["generated_text"] is None for row in bad
    )


def test_classify_knows_chats(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", rows_of([json.dumps([USER])]))
    spec = chatting(tmp_path, task="classify", labels=["yes", "no"])
    run_and_commit(spec)
    assert published(spec)[0]["label"] in ("yes", "no")


def test_a_begun_answer_is_a_part_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"row_key": f"{idx}", "document": "d", "query": f"q{idx}"} for idx in range(3)]
    write_table(tmp_path / "documents", rows)
    prompt = {"turns": TURNS, "answer_prefix": "Category:"}
    spec = chatting(tmp_path, prompt=prompt, reuse_outputs=True)
    run_and_commit(spec)
    for found, row in zip(published(spec), rows, strict=True):
        chat = prompt_of(*({**USER, "content": row[name]} for name in ("document", "query")))
        assert found["generated_text"] == fake_text([*chat, *b"Category:"])
        assert found["num_prompt_tokens"] == len(chat) + len("Category:")
    other = chatting(tmp_path, prompt={**prompt, "answer_prefix": "Topic:"}, reuse_outputs=True)
    assert other.identity != spec.identity
    assert plan_job(other, DS).manifest.counts.num_reused_rows == 0
    assert plan_job(spec, DS).manifest.counts.num_reused_rows == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"template": "{q}", "answer_prefix": "A:"}}, "end prompt.template with"),
        ({"prompt": {"messages": "chat", "answer_prefix": ""}}, "answer_prefix"),
        ({"prompt": {"messages": "chat", "answer_prefix": "A:"}, "task": "embed"}, "has no answer"),
    ],
)
def test_a_begun_answer_is_refused_where_none_can_be(changes: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chatting("/lake", **changes)


@pytest.mark.parametrize(
    "column",
    [[["hello"]], [1], [[{"role": "user"}]], [[{"role": "user", "content": b"x"}]]],
)
def test_a_column_of_another_type_is_refused_by_name(tmp_path: Path, column: list[Any]) -> None:
    write_table(tmp_path / "documents", rows_of(column))
    with pytest.raises(SpecError, match=r"prompt\.messages: column 'chat' .* a list of structs"):
        plan_job(chatting(tmp_path), DS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"messages": "absent"}, "prompt.messages: table .* has no column 'absent'"),
        (
            {"turns": [{"role": "user", "template": "{no}"}]},
            "prompt.turns: table .* no column 'no'",
        ),
        (
            {"turns": [{"role": "user", "template": "{chat}"}]},
            "prompt.turns: column 'chat' .* only",
        ),
    ],
)
def test_columns_of_chats_are_checked(tmp_path: Path, prompt: Any, message: str) -> None:
    write_table(tmp_path / "documents", rows_of([[USER]]))
    with pytest.raises(SpecError, match=message):
        plan_job(chatting(tmp_path, prompt=prompt), DS)


def test_advice_is_for_templates(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"prompt\.messages: advice is on the order of columns"):
        advise(chatting(tmp_path), DS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "one of template, turns and messages is missing"),
        ({"turns": []}, "one of template, turns and messages is missing"),
        ({"template": "{a}", "messages": "chat"}, "turns and messages must be alone"),
        ({"turns": TURNS, "messages": "chat"}, "turns and messages must be alone"),
        ({"messages": ""}, r"prompt\.messages: must not be empty"),
        ({"messages": "chat", "chat_template": False}, "always go through the model's chat"),
        ({"template": "{a}", "tools": TOOLS}, "are for the model's chat template"),
        ({"template": "{a}", "chat_template_kwargs": {"a": 1}}, "are for the model's chat"),
        ({"turns": [{"role": "bot", "template": "{x}"}]}, r"turns\[0\]\.role: must be 'system'"),
        ({"turns": [{"role": "user"}]}, r"turns\[0\]\.template: is missing"),
        ({"turns": [{"role": "user", "template": "{a!r}"}]}, "may not carry a conversion"),
        (
            {"system": "x", "turns": [{"role": "system", "template": "y"}]},
            "system: the first of turns is one already",
        ),
        ({"messages": "chat", "chat_template_kwargs": {"tokenize": True}}, "tokenize isn't for"),
        ({"messages": "chat", "chat_template_kwargs": {"tools": []}}, "tools isn't for"),
        ({"messages": "chat", "chat_template_kwargs": [1]}, "must be a mapping of names"),
        ({"messages": "chat", "chat_template_kwargs": "{"}, "must be JSON"),
        ({"messages": "chat", "chat_template_kwargs": {"a": {1, 2}}}, "must be JSON"),
        ({"messages": "chat", "tools": TOOLS[0]}, "tools: must be a list"),
        ({"messages": "chat", "tools": [{"name": "look"}]}, r"\[0\] must be like"),
        ({"messages": "chat", "tools": [{"type": "function", "function": {}}]}, "must be like"),
    ],
)
def test_what_does_not_fit_is_refused(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chatting("/lake", prompt=prompt)


def test_a_stored_spec_keeps_the_order_of_tools_and_arguments() -> None:
    prompt = {"messages": "chat", "tools": TOOLS, "chat_template_kwargs": {"b": {"z": 1, "a": 2}}}
    spec = chatting("/lake", prompt=prompt)
    stored = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    again = parse_spec_json(stored, source="test")
    assert again == spec
    arguments = again.prompt.chat_arguments
    assert json.dumps(arguments["tools"]) == json.dumps(TOOLS)
    assert list(arguments["b"]) == ["z", "a"]


def test_the_order_of_a_tools_fields_is_kept_in_the_identity() -> None:
    """Chat templates write tools out in their order."""

    def identity(**prompt: Any) -> str:
        return chatting("/lake", prompt={"messages": "chat", **prompt}).identity

    swapped = [{"function": TOOLS[0]["function"], "type": "function"}]
    assert len({identity(), identity(tools=TOOLS), identity(tools=swapped)}) == 3
    assert identity(tools=[], chat_template_kwargs={}) == identity()
