"""The three commands over the demo table give what stock vLLM gives, row for row."""

from __future__ import annotations

from typing import Any

import pytest
from support.demo_job import Demo, Job, snippet_prompt

SYSTEM = "Write a short snippet that answers the query.\n"


@pytest.fixture(scope="module")
def committed(demo: Demo) -> Job:
    """The demo job in two shards."""
    return demo.run_job("greedy", planner={"num_shards": 2})


@pytest.fixture(scope="module")
def rows(demo: Demo) -> list[dict[str, Any]]:
    return demo.rows()


@pytest.fixture(scope="module")
def chat_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the job with a chat template."""
    return [row for row in rows if row["package"] < "h"]


@pytest.fixture(scope="module")
def stock(
    demo: Demo, rows: list[dict[str, Any]], chat_rows: list[dict[str, Any]]
) -> list[list[list[str]]]:
    """Texts and finish reasons of all rows, and of those that chat."""
    texts = [*map(snippet_prompt, rows)]
    messages = [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{row['document']}\n\n{row['query']}"},
        ]
        for row in chat_rows
    ]
    return list(demo.stock("texts", [texts, messages]))


def test_every_row_equals_stock_vllm_in_table_order(
    rows: list[dict[str, Any]], committed: Job, stock: list[list[list[str]]]
) -> None:
    table = committed.table
    assert table["snippet_id"].to_pylist() == [row["snippet_id"] for row in rows]
    found = zip(
        table["generated_text"].to_pylist(), table["finish_reason"].to_pylist(), strict=True
    )
    assert [list(pair) for pair in found] == stock[0]


def test_with_a_chat_template_every_row_equals_stock_chat(
    demo: Demo, chat_rows: list[dict[str, Any]], stock: list[list[list[str]]]
) -> None:
    table = demo.run_job(
        "chat",
        prompt={"chat_template": True, "template": "{document}\n\n{query}"},
        input={"filter": [{"column": "package", "op": "<", "value": "h"}]},
    ).table
    assert len(chat_rows) > 50
    assert table["snippet_id"].to_pylist() == [row["snippet_id"] for row in chat_rows]
    assert table["generated_text"].to_pylist() == [text for text, _ in stock[1]]


def test_planned_sharing_is_achieved(committed: Job) -> None:
    report = committed.report
    assert report["num_rows_out"] == committed.table.num_rows >= 200
    achieved, planned = report["achieved_saving_ratio"], report["planned_saving_ratio"]
    assert planned > 0.5
    assert planned - 0.01 < achieved <= report["optimal_saving_ratio"]


def test_counts_add_up(committed: Job) -> None:
    table, report = committed.table, committed.report
    prompt = sum(table["num_prompt_tokens"].to_pylist())
    cached = sum(table["num_cached_tokens"].to_pylist())
    assert report["num_logical_tokens"] == prompt
    assert report["num_computed_tokens"] == prompt - cached
    assert table["error"].null_count == table.num_rows
    assert set(table["run_id"].to_pylist()) == {report["run_id"]}


def test_a_worker_leaves_a_trace_of_all_its_steps(committed: Job) -> None:
    assert committed.plan["num_shards"] == 2
    [trace] = committed.traces()  # of one engine
    columns = trace.to_pydict()
    assert columns["num_waiting"][-1] == 0
    running = columns["num_running"]
    last_full = max(step for step, num in enumerate(running) if num == max(running))
    assert min(running[:last_full]) > max(running) // 2, "the engine ran dry between shards"
    num_prompt = sum(columns["num_distinct_tokens"]) + sum(columns["num_prefix_tokens"])
    assert num_prompt == committed.report["num_computed_tokens"]
    assert num_prompt + sum(columns["num_cached_tokens"]) == committed.plan["num_logical_tokens"]
    assert sum(columns["num_prefix_tokens"]) > 0
    assert sum(columns["num_preempted"]) == 0
