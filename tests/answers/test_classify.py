"""Jobs that classify: labels with probabilities, and a score, in one step a row."""

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from prompts.test_tokenizer import build_tokenizer
from support.answers_job import NEXT, asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table

from batchllm_operator.answers.fakes import fake_logprobs
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report.page import render_report
from batchllm_operator.report.summary import format_summary
from batchllm_operator.spec import JobSpec

LABELS = {"relevant": "yes", "partly": "so", "irrelevant": "no"}


def classifying(folder: Path | str, **changes: Any) -> JobSpec:
    return asking(folder, **{"task": "classify", **changes})


def test_labels_that_begin_alike_are_refused_by_name(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    with pytest.raises(
        SpecError, match=r"'related' and 'relevant' begin with the same token \('r'"
    ):
        plan_job(classifying(tmp_path, labels=["relevant", "related", "other"]), DS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer to which rare words are several tokens."""
    return build_tokenizer(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (["b", "irrelevant"], "'irrelevant' is answered by 'irrelevant', which is 'i' + 'r' + "),
        ({"good": "b", "bad": "no good"}, "'bad' is answered by 'no good', which is 'n' + "),
        ({"good": "b", "無": "無"}, "'無' is answered by '無', which is "),
    ],
)
def test_answers_of_several_tokens_are_refused_with_their_pieces(
    model: Path, tmp_path: Path, labels: Any, named: str
) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    spec = classifying(
        tmp_path, labels=labels, model={"path": str(model)}, engine={"backend": "fake"}
    )
    with pytest.raises(SpecError, match=re.escape(named)):
        plan_job(spec, DS)


def test_a_first_piece_is_an_answer_where_a_label_asks_for_it(model: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 1))
    spec = classifying(
        tmp_path,
        labels={"relevant": "r", "irrelevant": "i"},
        model={"path": str(model)},
        engine={"backend": "fake"},
    )
    assert len(plan_job(spec, DS).manifest.answers.label_token_ids) == 2


def biased_logprobs(prompt_token_ids: list[int], num_labels: int) -> list[float]:
    """With a label that all rows prefer, and one that none has."""
    first, *others = fake_logprobs(prompt_token_ids, num_labels)
    return [first / 8, *others[:-1], -math.inf]


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchllm_operator.answers.fakes.fake_logprobs", biased_logprobs)


GRADES = {"1": 1.0, "2": 2.0, "5": 5.0, "9": 9.0}


def check_calibrated(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Checks all columns against Bayes' rule in plain Python; returns the prior."""
    asked = [row for row in rows if row["document"] is not None]
    prompts = (list(expected_prompt(row).encode()) for row in asked)
    logprobs = [biased_logprobs(prompt, len(GRADES)) for prompt in prompts]
    weights = [list(map(math.exp, row)) for row in logprobs]
    raw = [[each / sum(row) for each in row] for row in weights]
    prior = [fmean(column) for column in zip(*raw, strict=True)]
    by_key = {row["row_key"]: row for row in found}
    for row, probabilities, weight in zip(asked, raw, weights, strict=True):
        divided = [p / q if q else 0.0 for p, q in zip(probabilities, prior, strict=True)]
        wanted = dict(zip(GRADES, (each / sum(divided) for each in divided), strict=True))
        have = by_key[row["row_key"]]
        assert have["raw_probabilities"] == pytest.approx(
            dict(zip(GRADES, probabilities, strict=True))
        )
        assert have["probabilities"] == pytest.approx(wanted)
        assert have["label"] == have["generated_text"] == max(wanted, key=lambda k: wanted[k])
        assert have["probability"] == max(have["probabilities"].values())
        assert have["score"] == pytest.approx(sum(GRADES[k] * p for k, p in wanted.items()))
        assert have["label_mass"] == pytest.approx(min(sum(weight), 1))
    return dict(zip(GRADES, prior, strict=True))


def test_calibration_divides_by_the_tables_mean_probabilities(biased: None, tmp_path: Path) -> None:
    rows = document_rows(6, 3)
    rows[2] = {**rows[2], "document": None}
    rows[5] = {**rows[8], "row_key": "a duplicate, which counts too"}
    write_table(tmp_path / "documents", rows)
    given = {"label_values": GRADES, "max_failed_fraction": 0.1}
    plain = classifying(tmp_path, **given)
    run_and_commit(plain)
    assert {row["label"] for row in published(plain)} == {None, "1"}
    spec = classifying(tmp_path, **given, calibrate="prior")
    assert spec.identity != plain.identity
    plan = run_and_commit(spec)
    found = published(spec)
    prior = check_calibrated(found, rows)
    assert len({row["label"] for row in found if row["label"]}) > 1
    assert found[2]["probabilities"] is found[2]["raw_probabilities"] is None
    report = load_report(plan.folder.uri)
    assert report.answers.prior == pytest.approx(prior, abs=1e-6)
    assert report.answers.prior["9"] == 0
    assert f"prior          1 {prior['1']:.4g}, " in format_summary(report)
    assert f"1 {prior['1']:.4g},\n" in render_report(report)


def test_calibrated_labels_are_reused_by_what_the_model_said(biased: None, tmp_path: Path) -> None:
    rows = document_rows(4, 3)
    write_table(tmp_path / "documents", rows)
    run_and_commit(classifying(tmp_path, label_values=GRADES, reuse_outputs=True))
    later = [*rows[:5], {"row_key": "new", "document": "Another.", "query": "now?"}]
    write_table(tmp_path / "documents", later, NEXT)
    output = {"uri": f"{tmp_path}/out", "carry": ["query"], "add_columns": True}
    spec = classifying(
        tmp_path, label_values=GRADES, reuse_outputs=True, calibrate="prior", output=output
    )
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == 5
    check_calibrated(published(spec, NEXT), later)


def test_a_table_without_an_answer_needs_no_prior(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", [{**row, "document": None} for row in document_rows(1, 2)])
    spec = classifying(tmp_path, labels=LABELS, calibrate="prior", max_failed_fraction=1)
    plan = run_and_commit(spec)
    assert [row["raw_probabilities"] for row in published(spec)] == [None, None]
    answers = load_report(plan.folder.uri).answers
    assert answers.prior == {}
