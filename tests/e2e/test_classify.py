"""A job that classifies gives the probabilities that transformers' own logits give."""

from typing import Any

import pytest
import torch
from support.demo_job import Demo
from support.messy_table import answerable, messy_rows
from tokenizers import Tokenizer

ANSWERS = {"good": " Yes", "bad": " No", "ugly": " Maybe"}
VALUES = {"good": 1.0, "bad": -1.0, "ugly": -2.5}
PROMPT = "Message: {document}\nQuestion: {query}\nAnswer:"
QUERY = "Is the writer content?"


def test_probabilities_equal_those_of_transformers(real: Demo, reference: Any) -> None:
    job = real.run_job(
        "classify",
        task="classify",
        labels=ANSWERS,
        label_values=VALUES,
        sampling={"max_tokens": 1},
        prompt={"system": None, "template": PROMPT},
        input={"filter": [{"column": "query", "value": QUERY}]},
    )
    rows = [row for row in answerable(messy_rows()) if row["query"] == QUERY]
    tokenizer = Tokenizer.from_file(str(real.model / "tokenizer.json"))
    answers = [tokenizer.encode(answer).ids for answer in ANSWERS.values()]
    table = job.table.to_pylist()
    assert len(table) == len(rows) > 8
    for found, row in zip(table, rows, strict=True):
        assert found["snippet_id"] == row["snippet_id"]
        prompt = tokenizer.encode(PROMPT.format(**row)).ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        shares = [float(logits.softmax(0)[token]) for [token] in answers]
        wanted = {label: share / sum(shares) for label, share in zip(ANSWERS, shares, strict=True)}
        assert found["probabilities"] == pytest.approx(wanted, abs=1e-4)
        assert found["probability"] == max(found["probabilities"].values())
        assert found["probabilities"][found["label"]] == found["probability"]
        score = sum(VALUES[label] * each for label, each in wanted.items())
        assert found["score"] == pytest.approx(score, abs=1e-3)
        assert found["label_mass"] == pytest.approx(sum(shares), abs=1e-4)
        assert found["num_output_tokens"] == 1
    assert len({found["label"] for found in table}) > 1
    assert job.report["achieved_saving_ratio"] == job.report["planned_saving_ratio"]
