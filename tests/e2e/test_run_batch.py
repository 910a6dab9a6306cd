"""`batchllm run-batch` beside `vllm run-batch`: the same bodies for the same files."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.batch_lines import (
    CHAT,
    EMBEDDINGS,
    RERANK,
    SCORES,
    chat,
    comparable,
    line,
    read_lines,
    stock_lines,
    write_lines,
)
from support.demo_job import OFFLINE, Demo

SIZES = ["--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--enforce-eager"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def answered(
    demo: Demo, folder: Path, model: Path, asked: list[dict[str, Any]], *arguments: str
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Of each line its custom_id, what `vllm run-batch` answers, and what we do with one engine."""
    path, output = write_lines(folder / "in", asked), folder / "out"
    command = ["run-batch", "-i", str(path), "-o", str(output), "--model", str(model)]
    command += [*SIZES, *arguments]
    ended = demo.engines.run("batchllm_operator", command, env={**os.environ, **OFFLINE})
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("starting vLLM") == 1
    expected, found = stock_lines(path, model, *SIZES, *arguments), read_lines(output)
    assert len(found) == len(expected) == len(asked)
    for request, theirs, each in zip(asked, comparable(expected), comparable(found), strict=True):
        if isinstance(theirs["error"], str):  # ours names our endpoints
            assert each["error"]
            theirs["error"] = each["error"]
        yield request["custom_id"], theirs, each


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
    for name, theirs, each in answered(real, tmp_path, model, asked, "--max-model-len", "512"):
        assert each == theirs, name


def vector_lines(model: Path) -> list[dict[str, Any]]:
    texts = ["A man eats pasta.", "Someone is having a meal.", "The sky is blue.", "x " * 200]
    pairs = {"text_1": texts[:2], "text_2": texts[2:]}
    ranked = {"query": texts[0], "documents": texts[1:]}
    return [
        line("text", EMBEDDINGS, input=texts[0], model=str(model)),
        line("texts", EMBEDDINGS, input=texts),
        line("base64", EMBEDDINGS, input=texts[:2], encoding_format="base64"),
        line("raw", EMBEDDINGS, input=texts[:2], use_activation=False),
        line("one query", SCORES, queries=texts[0], documents=texts[1:]),
        line("pairs", f"/v1{SCORES}", **pairs),
        line("raw pairs", SCORES, use_activation=False, **pairs),
        line("items", SCORES, queries=texts[:1], items=texts[1]),
        line("rank", f"/v2{RERANK}", **ranked),
        line("best", RERANK, top_n=2, **ranked),
        line("dimensions", EMBEDDINGS, input=texts[0], dimensions=100),
        line("long", EMBEDDINGS, input=["fine", "word " * 600]),
        line("long document", SCORES, queries="fine", documents=["word " * 600]),
        line("format", EMBEDDINGS, input="x", encoding_format="bytes"),
        line("nothing", EMBEDDINGS, input=[]),
        line("uneven", SCORES, queries=texts[:2], documents=texts[:3]),
        line("no documents", SCORES, queries=texts[:2], documents=[]),
        line("model", EMBEDDINGS, input="x", model="another"),
        chat("chat", "x"),
        line("text", EMBEDDINGS, input="a repeated custom_id"),
    ]


def numbers(body: Any) -> tuple[Any, list[float]]:
    """A body without its numbers, and these."""
    found: list[float] = []
    for item in (body or {}).get("data", []) + (body or {}).get("results", []):
        for name in {"embedding", "score", "relevance_score"} & item.keys():
            given = item.pop(name)
            item[name] = type(given).__name__
            if isinstance(given, str):
                given = np.frombuffer(base64.b64decode(given), np.float32).tolist()
            found += given if isinstance(given, list) else [given]
    return body, found


def test_vectors_scores_and_ranks_are_those_of_vllms_own_command(
    real: Demo, minilm: Path, tmp_path: Path
) -> None:
    num_numbers = num_errors = 0
    for name, theirs, each in answered(real, tmp_path, minilm, vector_lines(minilm)):
        there, here = (numbers(one["response"]["body"]) for one in (theirs, each))
        np.testing.assert_allclose(here[1], there[1], rtol=0, atol=1e-5, err_msg=name)
        assert each == theirs, name
        num_numbers += len(here[1])
        num_errors += each["error"] is not None
    assert num_numbers == 384 * 10 + 3 + 2 + 2 + 1 + 3 + 2
    assert num_errors == 9
