"""Jobs with models that reason: what they think stands beside their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table

from batchllm_operator.engine.fake import fake_text
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

NEXT = "2026-02-01"


def reasoning(folder: Path | str, **changes: Any) -> JobSpec:
    return asking(folder, **{"model": {"path": "x", "reasoning_parser": "qwen3"}, **changes})


def test_each_row_has_its_reasoning(tmp_path: Path) -> None:
    rows = [*document_rows(3, 2), {"row_key": "none", "document": None, "query": "q"}]
    write_table(tmp_path / "documents", rows)
    spec = reasoning(tmp_path, max_failed_fraction=0.5, sampling={"logprobs": 0})
    run_and_commit(spec)
    *found, without = published(spec)
    assert without["reasoning"] is without["generated_text"] is None
    for each, row in zip(found, rows, strict=False):
        text = fake_text(list(expected_prompt(row).encode()))
        assert each["generated_text"] == text
        assert each["reasoning"] == f"reasoning of {text}"


def test_a_later_day_reuses_it_unless_it_was_read_otherwise(tmp_path: Path) -> None:
    rows = document_rows(3, 2)
    for ds in (DS, NEXT):
        write_table(tmp_path / "documents", rows, ds)
    spec = reasoning(tmp_path, reuse_outputs=True)
    before = run_and_commit(spec)
    assert before.manifest.counts.num_reused_rows == 0
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == len(rows)
    assert published(spec, NEXT)[0]["reasoning"].startswith("reasoning of ")
    for model in ({"path": "x"}, {"path": "x", "reasoning_parser": "deepseek_r1"}):
        other = reasoning(tmp_path, reuse_outputs=True, model=model)
        assert plan_job(other, NEXT).manifest.counts.num_reused_rows == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "classify", "labels": ["a", "b"]}, "is for task: generate"),
        ({"sampling": {"n": 2, "temperature": 1}}, "sampling.n: 1"),
        ({"model": {"path": "x", "reasoning_parser": ""}}, "must not be empty"),
        ({"engine": {"extra_args": {"reasoning_parser": "qwen3"}}}, "model.reasoning_parser"),
        ({"output": {"uri": "/lake/out", "carry": ["reasoning"]}}, "writes a column of that name"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        reasoning("/lake", **changes)
