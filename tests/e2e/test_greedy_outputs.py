"""Jobs with trained weights over messy rows: the texts of stock vLLM, and the planned saving."""

from itertools import takewhile
from typing import Any

import pytest
import torch
from support.demo_job import Demo, Job, snippet_prompt
from support.messy_table import answerable, messy_rows

SYSTEM = "Write a short snippet that answers the query.\n"
ROWS = answerable(messy_rows())
NULLS = {"max_failed_fraction": 0.1}  # of the rows without a document or a query
MARGIN = 0.2  # of logits, which bfloat16 may turn around


@pytest.fixture(scope="module")
def committed(real: Demo) -> Job:
    """A job in two shards."""
    return real.run_job("greedy", planner={"num_shards": 2}, **NULLS)


@pytest.fixture(scope="module")
def chatted(real: Demo) -> Job:
    """A job with a chat template, in one shard, that takes rows' control tokens as vLLM does."""
    prompt = {"template": "{document}\n\n{query}", "special_tokens": "keep"}
    return real.run_job("chat", prompt={"chat_template": True, **prompt}, **NULLS)


@pytest.fixture(scope="module")
def stock(real: Demo) -> dict[str, list[list[dict[str, Any]]]]:
    """What stock vLLM gives for all rows with a type of numbers: as texts, and as chats."""
    texts = [*map(snippet_prompt, ROWS)]
    chats = [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{row['document']}\n\n{row['query']}"},
        ]
        for row in ROWS
    ]
    return dict(real.stock("texts", {"float32": [texts, chats], "bfloat16": [texts]}))


def check_texts(job: Job, stock: list[dict[str, Any]]) -> None:
    """Rows are in the table's order, with the texts of stock vLLM but where a column is null."""
    table = job.table.to_pylist()
    assert [row["snippet_id"] for row in table] == [row["snippet_id"] for row in messy_rows()]
    errors = [row["error"]["kind"] for row in table if row["error"]]
    assert errors == ["null_value"] * (len(table) - len(ROWS))
    names = ("generated_text", "finish_reason")
    found = [tuple(row[name] for name in names) for row in table if not row["error"]]
    assert found == [(each["text"], each["finish_reason"]) for each in stock]


def test_every_row_equals_stock_vllm_in_table_order(
    committed: Job, stock: dict[str, list[list[dict[str, Any]]]]
) -> None:
    check_texts(committed, stock["float32"][0])
    assert len({each["text"] for each in stock["float32"][0]}) > len(ROWS) / 2


def test_with_a_chat_template_every_row_equals_stock_chat(
    chatted: Job, stock: dict[str, list[list[dict[str, Any]]]]
) -> None:
    check_texts(chatted, stock["float32"][1])
    assert {each["finish_reason"] for each in stock["float32"][1]} == {"stop", "length"}


def test_in_bfloat16_texts_part_only_where_float32_finds_two_tokens_nearly_as_likely(
    real: Demo, stock: dict[str, list[list[dict[str, Any]]]], reference: Any
) -> None:
    sampling, engine = {"logprobs": 1}, {"dtype": "bfloat16"}
    table = real.run_job("bfloat16", sampling=sampling, engine=engine, **NULLS).table.to_pylist()
    ours = [row for row in table if not row["error"]]
    margins = [
        margin(reference, its, [top["token"] for [top] in mine["top_logprobs"]])
        for mine, its in zip(ours, stock["bfloat16"][0], strict=True)
        if mine["generated_text"] != its["text"]
    ]
    assert len(margins) < len(ROWS) / 4
    assert [each for each in margins if each > MARGIN] == []


def margin(reference: Any, stock: dict[str, Any], ours: list[str]) -> float:
    """Between the logits, in float32, of the two tokens with which outputs first part."""
    pairs = zip(stock["tokens"], ours, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    before = stock["prompt_token_ids"] + stock["token_ids"][:place]
    with torch.inference_mode():
        logits = reference(torch.tensor([before]), logits_to_keep=1).logits[0, -1]
    our_id = stock["likely"][place][ours[place]]
    return abs(float(logits[stock["token_ids"][place]] - logits[our_id]))


def test_what_was_planned_is_computed_and_nothing_else(committed: Job, chatted: Job) -> None:
    report, counts = chatted.report, chatted.plan.manifest.counts
    assert report["num_computed_tokens"] == counts.num_planned_tokens
    assert 0.4 < report["planned_saving_ratio"] == report["achieved_saving_ratio"]
    # The engine of two shards also finds what the second one shares with the first.
    report, counts = committed.report, committed.plan.manifest.counts
    assert counts.num_optimal_tokens <= report["num_computed_tokens"] <= counts.num_planned_tokens


def test_counts_add_up(committed: Job) -> None:
    table, report = committed.table, committed.report
    counted = [row for row in table.to_pylist() if row["error"] is None]
    prompt, cached = (
        sum(row[name] for row in counted) for name in ("num_prompt_tokens", "num_cached_tokens")
    )
    assert report["num_logical_tokens"] == prompt
    assert report["num_computed_tokens"] == prompt - cached
    assert set(table["run_id"].to_pylist()) == {report["run_id"]}


def test_a_worker_leaves_a_trace_of_all_its_steps(committed: Job) -> None:
    report = committed.report
    assert len(committed.plan.manifest.shards) == 2
    [trace] = committed.traces()  # of one engine
    columns = trace.to_pydict()
    assert columns["num_waiting"][-1] == 0
    running = columns["num_running"]
    last_full = max(step for step, num in enumerate(running) if num == max(running))
    assert min(running[:last_full]) > max(running) // 2, "the engine ran dry between shards"
    num_prompt = sum(columns["num_distinct_tokens"]) + sum(columns["num_prefix_tokens"])
    assert num_prompt == report["num_computed_tokens"]
    num_asked = num_prompt + sum(columns["num_cached_tokens"])
    assert num_asked == report["num_logical_tokens"] - report["num_duplicate_tokens"]
    assert sum(columns["num_prefix_tokens"]) > 0
    assert sum(columns["num_preempted"]) == 0
