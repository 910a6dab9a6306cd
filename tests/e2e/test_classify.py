"""A job that classifies gives the probabilities that stock vLLM's full log-probabilities give."""

from __future__ import annotations

import math

import pytest
from support.demo_job import Demo
from tokenizers import Tokenizer

ANSWERS = {"good": " the", "bad": " of", "ugly": "!"}
VALUES = {"good": 1.0, "bad": -1.0, "ugly": -2.5}


def test_probabilities_equal_those_of_full_logprobs(demo: Demo) -> None:
    job = demo.run_job(
        "classify",
        task="classify",
        labels=ANSWERS,
        label_values=VALUES,
        sampling={"max_tokens": 1},
        prompt={"system": None, "template": "Document: {document}\nQuery: {query}\nAnswer:"},
        input={"filter": [{"column": "package", "op": "<", "value": "h"}]},
    )
    rows = demo.rows("h")
    texts = [f"Document: {row['document']}\nQuery: {row['query']}\nAnswer:" for row in rows]
    stock = demo.stock("first_logprobs", texts)
    tokenizer = Tokenizer.from_file(str(demo.model / "tokenizer.json"))
    num_prompt = len(tokenizer.encode(texts[0]).ids)
    tokens = {
        label: tokenizer.encode(texts[0] + answer).ids[num_prompt]
        for label, answer in ANSWERS.items()
    }
    table = job.table.to_pylist()
    assert len(table) == len(rows) > 50
    for found, row, logprobs in zip(table, rows, stock, strict=True):
        assert found["snippet_id"] == row["snippet_id"]
        weights = {label: math.exp(logprobs[str(token)]) for label, token in tokens.items()}
        wanted = {label: weight / sum(weights.values()) for label, weight in weights.items()}
        assert found["probabilities"] == pytest.approx(wanted, abs=1e-4)
        assert found["probability"] == max(found["probabilities"].values())
        assert found["probabilities"][found["label"]] == found["probability"]
        score = sum(VALUES[label] * each for label, each in wanted.items())
        assert found["score"] == pytest.approx(score, abs=1e-3)
        assert found["label_mass"] == pytest.approx(sum(weights.values()), abs=1e-4)
        assert found["num_output_tokens"] == 1
    assert len({found["label"] for found in table}) > 1
    assert job.report["achieved_saving_ratio"] > job.report["planned_saving_ratio"] - 0.01
