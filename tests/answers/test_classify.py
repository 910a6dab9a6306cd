"""Jobs that classify: labels with probabilities, and a score, in one step a row."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompts.test_tokenizer import build_tokenizer
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table
from support.lake_tables import LAKES

from batchllm_operator.commit.report import load_report
from batchllm_operator.engine.fake import fake_logprobs
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report.page import render_report
from batchllm_operator.report.summary import format_summary
from batchllm_operator.spec import JobSpec

NEXT = "2026-02-01"
LABELS = {"relevant": "yes", "partly": "so", "irrelevant": "no"}
VALUES = {"1": 1.0, "2": 2.0, "5": 5.0}


def classifying(folder: Path | str, **changes: Any) -> JobSpec:
    return asking(folder, **{"task": "classify", **changes})


def check_row(found: dict[str, Any], row: dict[str, Any], labels: list[str]) -> None:
    """The row's columns, computed apart from its log-probabilities."""
    logprobs = fake_logprobs(list(expected_prompt(row).encode()), len(labels))
    total = sum(map(math.exp, logprobs))
    wanted = {label: math.exp(value) / total for label, value in zip(labels, logprobs, strict=True)}
    assert found["probabilities"] == pytest.approx(wanted)
    assert found["label"] == max(labels, key=lambda label: wanted[label])
    assert found["generated_text"] == found["label"]
    assert found["probability"] == pytest.approx(max(wanted.values()))
    first, second, *_ = sorted(logprobs, reverse=True)
    assert found["logit_margin"] == pytest.approx(first - second)
    assert found["label_mass"] == pytest.approx(min(total, 1))
    assert found["num_output_tokens"] == 1
    if "score" in found:
        score = sum(VALUES[label] * each for label, each in wanted.items())
        assert found["score"] == pytest.approx(score)


@pytest.mark.parametrize("given", [{"labels": LABELS}, {"label_values": VALUES}])
def test_each_row_has_its_label_and_probabilities(tmp_path: Path, given: dict[str, Any]) -> None:
    rows = document_rows(4, 3)
    rows[2] = {**rows[2], "document": None}
    rows[5] = {**rows[8], "row_key": "a duplicate"}
    write_table(tmp_path / "documents", rows)
    spec = classifying(tmp_path, **given, max_failed_fraction=0.1)
    run_and_commit(spec)
    labels = sorted(LABELS if "labels" in given else VALUES)
    found = published(spec)
    assert [row["row_key"] for row in found] == [row["row_key"] for row in rows]
    for published_row, row in zip(found, rows, strict=True):
        if row["document"] is None:
            assert published_row["error"]["kind"] == "null_value"
            assert published_row["label"] is published_row["probabilities"] is None
            assert published_row["probability"] is None
        else:
            check_row(published_row, row, labels)
    assert ("score" in found[0]) == ("label_values" in given)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_labels_without_probabilities_are_a_row_error(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = document_rows(2, 2)
    write_table(tmp_path / "documents", rows)

    def logprobs(prompt_token_ids: list[int], num_labels: int) -> list[float]:
        is_third = prompt_token_ids == list(expected_prompt(rows[2]).encode())
        given = fake_logprobs(prompt_token_ids, num_labels)
        return [wrong] * num_labels if is_third else [*given[:-1], -math.inf]

    monkeypatch.setattr("batchllm_operator.engine.fake.fake_logprobs", logprobs)
    spec = classifying(tmp_path, labels=LABELS, max_failed_fraction=0.5)
    run_and_commit(spec)
    first, _, third, _ = published(spec)
    assert third["error"]["kind"] == "not_finite"
    assert third["status"] == "failed"
    assert third["label"] is third["probability"] is None
    assert sum(first["probabilities"].values()) == pytest.approx(1)
    assert first["probabilities"]["relevant"] == 0


def test_column_types(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 2))
    run_and_commit(classifying(tmp_path, label_values=VALUES))
    schema = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet")
    number = pa.float64()
    kinds = {name: schema.field(name).type for name in schema.names}
    assert kinds["label"] == pa.string()
    assert kinds["probabilities"] == pa.struct([(label, number) for label in sorted(VALUES)])
    assert kinds["probability"] == kinds["logit_margin"] == kinds["score"] == number
    assert kinds["label_mass"] == number


@pytest.mark.parametrize("kind", LAKES)
def test_every_format_holds_labels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LAKES[kind]
    source, target = (make(str(tmp_path), tmp_path, monkeypatch, name) for name in ("docs", "out"))
    rows = document_rows(3, 2)
    source.append(DS, pa.Table.from_pylist(rows))
    spec = classifying(
        tmp_path,
        label_values=VALUES,
        input={"uri": source.address, "key": "row_key"},
        output={"uri": target.address, "staging_uri": target.staging},
    )
    run_and_commit(spec)
    found = {row["row_key"]: row for row in published(spec)}
    assert len(found) == len(rows)
    for row in rows:
        check_row(found[row["row_key"]], row, sorted(VALUES))


@pytest.mark.parametrize("kind", LAKES)
def test_every_format_holds_labels_of_any_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LAKES[kind](str(tmp_path), tmp_path, monkeypatch, "out")
    rows = document_rows(2, 2)
    write_table(tmp_path / "documents", rows)
    labels = {"not relevant": "no", " yes": "yes", "a.b=c, {d};": "a", "無関係": "無", "Ü": "Ü"}
    output = {"uri": target.address, "staging_uri": target.staging}
    spec = classifying(tmp_path, labels=labels, output=output)
    run_and_commit(spec)
    found = {row["row_key"]: row for row in published(spec)}
    for row in rows:
        check_row(found[row["row_key"]], row, sorted(labels))


def test_a_later_day_reuses_labels(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    spec = classifying(tmp_path, labels=LABELS, reuse_outputs=True)
    run_and_commit(spec)
    later = [*document_rows(3, 2), {"row_key": "new", "document": "Another.", "query": "now?"}]
    write_table(tmp_path / "documents", later, NEXT)
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == 6
    for found, row in zip(published(spec, NEXT), later, strict=True):
        check_row(found, row, sorted(LABELS))


def test_other_labels_reuse_nothing(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    run_and_commit(classifying(tmp_path, labels=LABELS, reuse_outputs=True))
    others = {**LABELS, "irrelevant": "never"}
    spec = classifying(tmp_path, labels=others, reuse_outputs=True)
    assert plan_job(spec, DS).manifest.counts.num_reused_rows == 0


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
    assert len(plan_job(spec, DS).manifest.label_token_ids) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["yes"]}, "from 2 to 128"),
        ({"labels": ["yes", "no", "yes"]}, "names a label twice"),
        ({"labels": {"a": "yes", "b": "yes"}}, "the same answer"),
        ({"labels": {"Yes": "1", "yes": "2"}}, "differ by case only"),
        ({"labels": {}}, "from 2 to 128"),
        ({"labels": {f"{n}": f"{n}" for n in range(129)}}, "from 2 to 128"),
        ({"label_values": {"relevant": 1}}, "a number for each of labels"),
        ({"label_values": {**dict.fromkeys(LABELS, 1.0), "more": 2}}, "a number for each"),
        ({"sampling": {"max_tokens": 8}}, "leave sampling out"),
        ({"sampling": {"max_tokens": 1, "temperature": 1}}, "leave sampling out"),
        ({"task": "generate"}, "are for task: classify"),
        ({"task": "generate", "labels": {}, "calibrate": "prior"}, "are for task: classify"),
        ({"calibrate": "mean"}, "calibrate"),
        ({"output": {"uri": "/lake/out", "carry": ["label"]}}, "writes a column of that name"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        classifying("/lake", **{"labels": LABELS, **changes})


def biased_logprobs(prompt_token_ids: list[int], num_labels: int) -> list[float]:
    """With a label that all rows prefer, and one that none has."""
    first, *others = fake_logprobs(prompt_token_ids, num_labels)
    return [first / 8, *others[:-1], -math.inf]


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchllm_operator.engine.fake.fake_logprobs", biased_logprobs)


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
    assert report.answers is not None
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
    assert answers is not None
    assert answers.prior == {}
