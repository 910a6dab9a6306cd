"""`batchllm run-batch` beside `vllm run-batch`: the same bodies for the same files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from support.batch_lines import (
    CHAT,
    EMBEDDINGS,
    chat,
    comparable,
    line,
    read_lines,
    stock_lines,
    write_lines,
)
from support.demo_job import OFFLINE, Demo

SIZES = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "256M"]
SIZES += ["--enforce-eager"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def ours(demo: Demo, path: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    output = path.with_suffix(".ours")
    command = ["run-batch", "-i", str(path), "-o", str(output), "--model", str(model), *arguments]
    ended = demo.engines.run("batchllm_operator", command, env={**os.environ, **OFFLINE})
    assert ended.returncode == 0, ended.stderr
    return read_lines(output)


def test_chats_have_the_bodies_of_vllms_own_command(real: Demo, tmp_path: Path) -> None:
    model = real.model
    turns = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "Which city is France's capital?"}]},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked = [
        *(chat(f"plain-{idx}", f"Count to {idx}.", model=str(model)) for idx in range(6)),
        chat("system", "", messages=turns),
        chat("stop", "Count from one to ten.", max_tokens=40, stop=["3", "three", ","]),
        chat("likely", "Name a colour.", logprobs=True, top_logprobs=3),
        chat("sampled", "Name a colour.", temperature=0.8, seed=7),
        chat("several", "Name a colour.", temperature=0.8, seed=7, n=3),
        chat("model's", "Name a colour.", temperature=None, seed=7),
        chat("form", "Who are you?", response_format=form, max_tokens=40),
        chat("biased", "Name a colour.", logit_bias={"28": 100.0}, min_tokens=3),
        chat("penalized", "Count to 5.", repetition_penalty=1.3, presence_penalty=0.5),
        chat("tools", "What can you do?", tools=tools, tool_choice="none"),
        chat("long", "word " * 600),
        chat("limit", "word " * 480, max_tokens=500),
        chat("model", "x", model="another"),
        line("endpoint", "/v1/images", messages=turns),
        line("embedding", EMBEDDINGS, input="x"),
        line("twin", CHAT, messages=turns, max_tokens=5, temperature=0),
        line("twin", CHAT, messages=turns, max_tokens=6, temperature=0),
    ]
    path = write_lines(tmp_path / "in", asked)
    expected, found = stock_lines(path, model, *SIZES), ours(real, path, model, *SIZES)
    assert len(found) == len(expected) == len(asked)
    for request, theirs, each in zip(asked, comparable(expected), comparable(found), strict=True):
        if isinstance(theirs["error"], str):  # ours names our endpoints
            theirs["error"] = each["error"] = each["error"][:3]
        assert each == theirs, request["custom_id"]


def test_sets_share_one_engine(real: Demo, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat(f"{i}", "Hi.", max_tokens=1 + i) for i in range(3)])
    command = ["run-batch", "-i", str(path), "-o", str(tmp_path / "out"), *SIZES]
    command += ["--model", str(real.model)]
    ended = real.engines.run("batchllm_operator", command, env={**os.environ, **OFFLINE})
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("starting vLLM") == 1
    numbers = [
        each["response"]["body"]["usage"]["completion_tokens"]
        for each in read_lines(tmp_path / "out")
    ]
    assert numbers == [1, 2, 3]
    (state,) = tmp_path.glob("out.work/*/sets.json")
    assert len(json.loads(state.read_text())["sets"]) == 3
    shutil.rmtree(tmp_path / "out.work")
