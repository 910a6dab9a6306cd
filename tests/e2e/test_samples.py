"""Several answers to a row, and log-probabilities, are those of stock vLLM's `LLM.generate`."""

from typing import Any

import pytest
from support.demo_job import Demo, Job, snippet_prompt

FIRST = {"filter": [{"column": "package", "op": "<", "value": "h"}]}
SAMPLED = {"max_tokens": 12, "temperature": 0.8, "seed": 11, "n": 3}
SCORED = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3}
BLOCK_SIZE = 32  # of vLLM on a CPU


@pytest.fixture(scope="module")
def stock(demo: Demo) -> list[list[list[Any]]]:
    """The completions of each row, sampled and with log-probabilities."""
    prompts = [*map(snippet_prompt, demo.rows("h"))]
    jobs = [{"prompts": prompts, "sampling": sampling} for sampling in (SAMPLED, SCORED)]
    return list(demo.stock("answers", jobs))


@pytest.fixture(scope="module")
def sampled(demo: Demo) -> Job:
    return demo.run_job("samples", sampling=SAMPLED, input=FIRST)


def test_all_texts_of_a_row_equal_those_of_stock_vllm(
    sampled: Job, stock: list[list[list[Any]]]
) -> None:
    table = sampled.table
    texts = [[text for text, _ in completions] for completions in stock[0]]
    assert len(texts) > 50
    assert table["generated_texts"].to_pylist() == texts
    assert table["generated_text"].to_pylist() == [row[0] for row in texts]
    assert sum(len(set(row)) > 1 for row in texts) > 0.8 * len(texts)


def test_the_prompt_of_several_answers_is_computed_once(sampled: Job) -> None:
    report, table = sampled.report, sampled.table
    assert report["achieved_saving_ratio"] > report["planned_saving_ratio"] - 0.01
    [trace] = sampled.traces()
    columns = trace.to_pydict()
    num_computed = sum(columns["num_distinct_tokens"]) + sum(columns["num_prefix_tokens"])
    # Answers after the first compute the prompt's tokens after its last full block again.
    num_repeated = sum(1 + (num - 1) % BLOCK_SIZE for num in table["num_prompt_tokens"].to_pylist())
    assert num_computed == report["num_computed_tokens"] + (SAMPLED["n"] - 1) * num_repeated
    assert sum(columns["num_preempted"]) == 0


def test_log_probabilities_equal_those_of_stock_vllm(
    demo: Demo, stock: list[list[list[Any]]]
) -> None:
    table = demo.run_job("logprobs", sampling=SCORED, input=FIRST).table.to_pylist()
    assert len(table) == len(stock[1])
    for found, [(text, places)] in zip(table, stock[1], strict=True):
        logprobs = [logprob for logprob, _ in places]
        assert found["generated_text"] == text
        assert found["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert found["mean_logprob"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-4)
        for top, (_, wanted) in zip(found["top_logprobs"], places, strict=True):
            assert [each["logprob"] for each in top] == pytest.approx(
                [logprob for _, logprob in wanted], abs=1e-4
            )
            assert [each["token"] for each in top] == [token for token, _ in wanted]
