"""Jobs over chats give the token ids and the outputs of stock vLLM's `LLM.chat`."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.demo_job import DS, Demo

from batchllm_operator.errors import SpecError
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.spec import load_spec

HEAD = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if not enable_thinking | default(true) %}Be quick.\n{% endif %}"
)
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BY_TEXT = (
    HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for name, value in call.function.arguments | items %}({{ name }}={{ value }}){% endfor %}"
    "{% endfor %}{{ m.tool_call_id }}{{ m.reasoning_content }}<|im_end|>\n{% endfor %}" + TAIL
)
BY_PARTS = (
    HEAD + "{% set loop_messages = messages[0:] %}{% for m in loop_messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}[{{ part.text | trim }}]{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}" + TAIL
)
KNOWS_DEVELOPERS = BY_TEXT + "{# 'developer' #}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <something> up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"word": "é"}'}}
USER = {"role": "user", "content": " What is <it>? "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, {**USER, "name": "ann", "other": 1}],
    [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}],
    [
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("a ", "", "b")]},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": text} for text in ("c ", "d")],
        },
        {"role": "assistant", "content": "", "reasoning": "So it is.", "tool_calls": []},
        {"role": "user", "content": ""},
    ],
    [{"role": "developer", "content": "Be kind."}, USER],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        USER,
        {"role": "developer", "content": "Be kind.", "tools": TOOLS},
        {"role": "assistant", "content": "It ends so."},
    ],
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"chat_template_kwargs": {"enable_thinking": False, "unknown": 1}},
]
PLUGIN = str(Path(__file__).parents[1] / "support" / "reasoning_plugin.py")


@dataclass(frozen=True)
class Stock:
    """What stock vLLM gives: for each chat token ids, finish reason, reasoning and text."""

    prompts: dict[tuple[str, int], list[Any]]
    rows: list[dict[str, Any]]
    turns: list[Any]
    answers: list[Any]


@pytest.fixture(scope="module")
def model(demo: Demo) -> Path:
    return with_template(demo, "chat-model", BY_TEXT)


@pytest.fixture(scope="module")
def stock(demo: Demo, model: Path) -> Stock:
    templates = [BY_TEXT, BY_PARTS, KNOWS_DEVELOPERS]
    keys = [(template, idx) for template in templates for idx in range(len(ARGUMENTS))]
    calls = [
        {"messages": CHATS, "chat_template": template, "max_tokens": 1, **ARGUMENTS[idx]}
        for template, idx in keys
    ]
    documents = pq.read_table(demo.folder / "documents").to_pylist()[:40]
    rows = [
        {"key": f"{idx:03}", "chat": chat_of(row), "doc": row["document"], "query": row["query"]}
        for idx, row in enumerate(documents)
    ]
    turns = [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": row["doc"]},
            {"role": "user", "content": row["query"]},
        ]
        for row in rows
    ]
    calls.append({"messages": turns, "max_tokens": 1, "tools": TOOLS})
    chats = [row["chat"] for row in rows]
    calls.append({"messages": chats, "max_tokens": 16, "tools": TOOLS, "plugin": PLUGIN})
    *found, of_turns, answers = demo.stock("chats", calls, model)
    return Stock(dict(zip(keys, found, strict=True)), rows, of_turns, answers)


def with_template(demo: Demo, name: str, template: str) -> Path:
    """A copy of the demo's model with another chat template."""
    folder = demo.folder / name
    if not folder.exists():
        shutil.copytree(demo.model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def chat_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"role": "user", "content": row["document"], "name": row["package"]}
    reply = {"role": "assistant", "content": "I have read it.", "tool_calls": [CALL]}
    return [first, reply, {"role": "user", "content": row["query"]}]


def in_spec(arguments: dict[str, Any]) -> dict[str, Any]:
    """For `prompt`: without the demo's own, and as text, since `write_spec` sorts fields."""
    texts = {name: json.dumps(each) for name, each in arguments.items()}
    return {"system": None, "template": None, **texts}


@pytest.mark.parametrize("template", [BY_TEXT, BY_PARTS, KNOWS_DEVELOPERS])
def test_token_ids_equal_those_of_stock_chat(demo: Demo, stock: Stock, template: str) -> None:
    folder = with_template(demo, "chat-template", template)
    column = pa.array([json.dumps(chat) for chat in CHATS])
    for idx, arguments in enumerate(ARGUMENTS):
        prompt = {"messages": "chat", **in_spec(arguments)}
        spec = load_spec(demo.write_spec("chat-ids", model={"path": str(folder)}, prompt=prompt))
        tokenizer = load_tokenizer(spec, DS)
        batch = pa.record_batch({"chat": column})
        rendered = tokenizer.renderer(spec.prompt).render(batch)
        assert not rendered.errors
        found = tokenizer.encode(rendered.present()).to_lists()
        assert found == [ids for ids, *_ in stock.prompts[template, idx]]


def test_turns_have_the_token_ids_of_stock_chat(demo: Demo, model: Path, stock: Stock) -> None:
    turns = [{"role": "user", "template": "{doc}"}, {"role": "user", "template": "{query}"}]
    prompt = {"turns": turns, **in_spec({"tools": TOOLS}), "system": "Be brief."}
    spec = load_spec(demo.write_spec("turns", model={"path": str(model)}, prompt=prompt))
    tokenizer = load_tokenizer(spec, DS)
    batch = pa.RecordBatch.from_pylist(stock.rows)
    rendered = tokenizer.renderer(spec.prompt).render(batch)
    found = tokenizer.encode(rendered.present()).to_lists()
    assert found == [ids for ids, *_ in stock.turns]


def test_every_row_equals_stock_chat_and_its_parser(demo: Demo, model: Path, stock: Stock) -> None:
    partition = demo.folder / "chats" / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(stock.rows), partition / "a.parquet")
    job = demo.run_job(
        "chats",
        model={"path": str(model), "reasoning_parser": "demo"},
        input={"uri": "chats", "key": "key"},
        prompt={"messages": "chat", **in_spec({"tools": TOOLS})},
        engine={"extra_args": {"reasoning_parser_plugin": PLUGIN}},
    )
    table = job.table
    assert table["error"].null_count == table.num_rows == len(stock.answers)
    names = ("num_prompt_tokens", "finish_reason", "reasoning", "generated_text")
    found = zip(*(table[name].to_pylist() for name in names), strict=True)
    assert list(found) == [(len(ids), *answer) for ids, *answer in stock.answers]
    num_answers = sum(map(bool, table["generated_text"].to_pylist()))
    assert 5 < num_answers < len(stock.answers) - 5, "all the others end while they reason"
    planned = job.report["planned_saving_ratio"]
    assert job.report["achieved_saving_ratio"] > planned - 0.01 > 0.1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_r1", "could not locate think start/end tokens"),
        ("dem", "has no parser 'dem'; it has cohere_command3, "),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused(demo: Demo, name: str, reason: str) -> None:
    with pytest.raises(SpecError, match=f"^model.reasoning_parser: .*{reason}"):
        demo.run_job(
            name,
            model={"path": "./model", "reasoning_parser": name},
            engine={"extra_args": {"reasoning_parser_plugin": PLUGIN}},
        )
