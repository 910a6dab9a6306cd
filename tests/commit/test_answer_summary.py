"""What a report says of a run's answers as a whole."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest
from markupsafe import escape
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table

from batchllm_operator.answers import PlannedAnswers
from batchllm_operator.answers.fakes import fake_logprobs, fake_text
from batchllm_operator.answers.vectors import FAKE_SIZE
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.report import load_report, summarize_answers
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report.comparison import compare
from batchllm_operator.report.page import render_report
from batchllm_operator.report.summary import format_summary
from batchllm_operator.row_error import RowError
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.stored_plan.manifest import ERROR_FIELD
from batchllm_operator.stored_plan.run_report import AnswerSummary, RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NEXT = "2026-02-01"
CLASSIFY = {"task": "classify", "label_values": {"no": 0, "partly": 1, "yes": 3}}
CHOICES = {"response_format": {"type": "choice", "choices": ["red", "green", "blue"]}}
SCORED = {"sampling": {"max_tokens": 4, "logprobs": 1}}


def rows_of_table() -> list[dict[str, Any]]:
    """With three rows of one prompt, and one that can't be prompted."""
    rows = [*document_rows(6, 5), {"row_key": "none", "document": None, "query": "q"}]
    for copy in (7, 13):
        rows[copy] = {**rows[2], "row_key": f"copy {copy}"}
    return rows


def report_of(plan: StoredPlan) -> RunReport:
    return load_report(plan.folder.uri)


@pytest.mark.parametrize(
    ("ask", "counted", "averaged"),
    [
        (CLASSIFY, ["label"], ["probability", "label_mass", "score"]),
        (CHOICES, ["generated_text"], []),
        (SCORED, [], ["mean_logprob"]),
    ],
    ids=["classify", "choice", "logprobs"],
)
def test_answers_count_for_each_row(
    tmp_path: Path, ask: dict[str, Any], counted: list[str], averaged: list[str]
) -> None:
    write_table(tmp_path / "documents", rows_of_table())
    spec = asking(tmp_path, **ask, max_failed_fraction=0.5)
    plan = run_and_commit(spec)
    assert plan.manifest.counts.num_duplicate_rows == 2
    answers = report_of(plan).answers
    assert (list(answers.counts), list(answers.means)) == (counted, averaged)
    answered = [row for row in published(spec) if row["error"] is None]
    assert len(answered) == 30
    for name in counted:
        assert answers.counts[name] == Counter(row[name] for row in answered)
        numbers = list(answers.counts[name].values())
        assert numbers == sorted(numbers, reverse=True)
    for name in averaged:
        assert answers.means[name] == pytest.approx(fmean(row[name] for row in answered), abs=1e-6)


def test_reused_answers_count_too(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", rows_of_table())
    spec = asking(tmp_path, **CLASSIFY, max_failed_fraction=0.5, reuse_outputs=True)
    first = report_of(run_and_commit(spec))
    write_table(tmp_path / "documents", rows_of_table()[::-1])
    second = report_of(run_and_commit(spec))
    assert second.plan.num_reused_rows == 30
    assert second.answers == first.answers


def test_a_job_of_texts_has_none(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 2))
    report = report_of(run_and_commit(asking(tmp_path)))
    assert report.answers == AnswerSummary()
    assert "means" not in format_summary(report)


@pytest.fixture
def few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine's labels have an eighth of their probability, under a tenth on average."""

    def logprobs(prompt_token_ids: list[int], num_labels: int) -> list[float]:
        return [value - math.log(8) for value in fake_logprobs(prompt_token_ids, num_labels)]

    monkeypatch.setattr("batchllm_operator.answers.fakes.fake_logprobs", logprobs)


def test_labels_that_the_model_does_not_choose_are_warned_of(
    few_labels: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "documents", rows_of_table())
    spec = asking(tmp_path, **CLASSIFY, max_failed_fraction=0.5)
    with caplog.at_level("WARNING", logger="batchllm_operator"):
        plan = plan_job(spec, DS)
        run_worker(plan)
        in_run = [record for record in caplog.messages if "label_mass" in record]
        commit_run(plan.folder.uri)
    answers = report_of(plan).answers
    mean = fmean(row["label_mass"] for row in published(spec) if row["error"] is None)
    assert answers.means["label_mass"] == pytest.approx(mean, abs=1e-6)
    [warning] = answers.warnings
    assert f"{mean:.2g} of the model's probability" in warning
    assert "'no', 'partly', 'yes'" in warning
    assert "answer begins" in warning
    prompts = Counter(expected_prompt(row) for row in rows_of_table() if row["document"])
    [(prompt, _)] = prompts.most_common(1)
    assert f"(most often {fake_text(list(prompt.encode()))!r} or " in warning
    assert len(in_run) == 1, "one worker has run all shards"
    assert caplog.messages[-1] == warning
    assert warning in format_summary(report_of(plan))
    assert escape(warning) in render_report(report_of(plan))


def test_the_summary_names_the_most_frequent_labels(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", rows_of_table())
    report = report_of(run_and_commit(asking(tmp_path, **CLASSIFY, max_failed_fraction=0.5)))
    assert report.answers.means["label_mass"] > 0.1 and report.answers.warnings == ()
    [(label, number), *_] = report.answers.counts["label"].items()
    lines = format_summary(report).splitlines()
    [line] = [line for line in lines if line.startswith("  label ")]
    assert line.split()[1:4] == [label, f"{100 * number / 30:.1f}", "%,"]
    [line] = [line for line in lines if line.startswith("  means ")]
    assert f"score {report.answers.means['score']:.4g}" in line


class Parts:
    """Outputs of one part."""

    def __init__(self, logprobs: list[list[float] | None], errors: list[RowError | None]) -> None:
        kind = pa.list_(pa.float64())
        self._table = pa.table(
            {
                "row_idxs": [[idx] for idx in range(len(logprobs))],
                "generated_text": ["x"] * len(logprobs),
                "error": pa.array(errors, ERROR_FIELD.type),
                "token_logprobs": pa.array(logprobs, kind),
                "top_logprobs": pa.nulls(
                    len(logprobs),
                    pa.list_(pa.list_(pa.struct({"token": pa.string(), "logprob": pa.float64()}))),
                ),
            }
        )

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        yield self._table.select(list(columns))


def test_only_finite_numbers_of_answers_without_an_error_have_a_mean(tmp_path: Path) -> None:
    spec = asking(tmp_path, **SCORED)
    parts = Parts(
        [[-1.0], [-3.0], [float("-inf")], [], [-9.0]], [None, None, None, None, RowError("x")]
    )
    found = summarize_answers(spec, [PlannedAnswers()], [parts])
    assert found.means == {"mean_logprob": -2.0}
    failed = Parts([None], [RowError("engine_error", "x")])
    assert summarize_answers(spec, [PlannedAnswers()], [failed]).means == {}


def test_embeddings_are_told_by_their_size(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    report = report_of(run_and_commit(asking(tmp_path, task="embed")))
    assert report.answers.embedding_size == FAKE_SIZE
    assert f"  embeddings     {FAKE_SIZE} numbers each\n" in format_summary(report)
    assert report.sample_rows == ()
    measures = compare(report, report).sections["Answers"]
    assert [measure.name for measure in measures] == ["Embedding size"]
    assert "numbers each" in render_report(report)
