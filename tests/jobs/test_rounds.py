"""Prompts that need answers to others: rounds, one plan after the other, and one commit."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jobs.test_lake_formats import run_job
from prompts.test_tokenizer import build_tokenizer
from support.fake_job import DS, document_rows, write_table
from support.lake_tables import Lake, open_lake
from support.prompts_job import asks_of, rows_by_key, several
from support.staged_job import Engines

from batchllm_operator.answers.fakes import digest_of, fake_text
from batchllm_operator.commit import commit_run as commit_module
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.errors import FailedRowsError, IncompleteRunError, SpecError, TableError
from batchllm_operator.inspect.gc import find_garbage
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.plan import plan_job as plan_module
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prompts import load_tokenizers
from batchllm_operator.report import format_plan, format_status, format_summary
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import newest_plan_uri, read_status
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

TOPICS = ["cars", "music", "other"]
PROMPTS: dict[str, Any] = {
    "topic": {
        "template": "{document}\n\nTopic of {query}:",
        "response_format": {"type": "choice", "choices": TOPICS},
    },
    "summary": {
        "template": "{document}\n\nSummarise for {query}:",
        "when": "topic == 'cars' or topic.generated_text == 'music'",
    },
    "title": {
        "template": "{document}\n\nSummary: {summary} ({topic}). Title:",
        "when": "query != 'question 1'",
    },
}


def expected(row: dict[str, Any]) -> dict[str, str | None]:
    """The answers to `PROMPTS` by hand, one prompt after the other."""

    def ids(text: str) -> list[int]:
        return list(f"{row['document']}\n\n{text}".encode())

    topic, summary, title = TOPICS[digest_of(ids(f"Topic of {row['query']}:")) % 3], None, None
    if topic in ("cars", "music"):
        summary = fake_text(ids(f"Summarise for {row['query']}:"))
        if row["query"] != "question 1":
            title = fake_text(ids(f"Summary: {summary} ({topic}). Title:"))
    return {"topic": topic, "summary": summary, "title": title}


def texts(spec: JobSpec) -> dict[str, dict[str, str | None]]:
    return {
        key: {name: row[name]["generated_text"] for name in spec.prompts}
        for key, row in rows_by_key(spec).items()
    }


def by_hand(rows: list[dict[str, Any]]) -> dict[str, dict[str, str | None]]:
    return {row["row_key"]: expected(row) for row in rows}


def run_all(spec: JobSpec) -> RunReport:
    plans = [run_job(spec) for _ in spec.rounds]
    return commit_run(plans[-1])


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    write_table(tmp_path / "documents", document_rows())
    return several(tmp_path, PROMPTS)


def test_answers_are_those_of_jobs_one_after_the_other(spec: JobSpec) -> None:
    names = list(spec.prompts)
    rounds = [[names[number] for number in numbers] for numbers in spec.rounds]
    assert rounds == [["topic"], ["summary"], ["title"]]
    report = run_all(spec)
    answers = texts(spec)
    assert answers == by_hand(document_rows())
    for row in rows_by_key(spec).values():
        for name in names:
            has_text = row[name]["generated_text"] is not None
            assert (row[name]["status"] != "skipped") == has_text
            assert row[name]["error"] is None
    num_asked = sum(text is not None for row in answers.values() for text in row.values())
    assert report.num_rounds == 3
    assert report.plan.num_asked_rows == report.done.num_rows == report.num_rows_out == num_asked
    assert report.num_failed_rows == 0
    assert report.num_repeated_tokens > 0
    assert f"rounds         3; {report.num_repeated_tokens:,} prompt tokens computed again" in (
        format_summary(report)
    )
    assert [run.shard_idx for run in report.shards] == list(range(report.num_shards))
    assert Path(report.plan_uri, "report.html").is_file()
    with pytest.raises(SpecError, match="--only: isn't for prompts that need answers to others"):
        plan_job(spec, DS, ["title"])


def test_a_label_and_its_probability_are_placed_as_they_are_published(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    prompts = {
        "relevant": {
            "template": "{document}\n{query}?",
            "task": "classify",
            "labels": {"yes": "y", "no": "n"},
            "calibrate": "prior",
        },
        "why": {
            "template": "{document}: {relevant} by {relevant.probability}"
            ", {relevant.probabilities.no}",
            "when": "relevant == 'yes' and relevant.probability > 0.5",
        },
    }
    spec = several(tmp_path, prompts)
    run_all(spec)
    found, num_asked = rows_by_key(spec), 0
    for row in document_rows():
        relevant, why = (found[row["row_key"]][name] for name in ("relevant", "why"))
        if relevant["label"] == "no":
            assert why["status"] == "skipped"
            continue
        numbers = relevant["probability"], dict(relevant["probabilities"])["no"]
        text = f"{row['document']}: yes by {numbers[0]!r}, {numbers[1]!r}"
        assert why["generated_text"] == fake_text(list(text.encode()))
        num_asked += 1
    assert 0 < num_asked < len(found)


def test_planning_goes_on_with_the_next_round_once_one_is_finished(spec: JobSpec) -> None:
    first = plan_job(spec, DS)
    assert plan_job(spec, DS).manifest == first.manifest
    assert first.manifest.round_idx == 0
    assert "round 1 of 3: topic" in format_plan(first.manifest, first.folder.uri)
    run_worker(first)
    with pytest.raises(
        IncompleteRunError, match=r"round 1 of 3: prompts summary, title aren't asked yet"
    ):
        commit_run(first)
    second = plan_job(spec, DS)
    assert (second.manifest.round_idx, second.manifest.before) == (1, first.manifest.plan_id)
    assert re.search(
        r"round 2 of 3: summary; [1-9][0-9,]* prompt tokens computed again",
        format_plan(second.manifest, second.folder.uri),
    )
    assert plan_job(spec, DS).manifest == second.manifest  # it isn't finished
    assert "round 2 of 3, " in format_status(read_status(second))
    assert verify_worker(first.folder.uri).num_finished == len(first.manifest.shards)
    run_worker(second)
    third = run_job(spec)
    assert plan_job(spec, DS).manifest == third.manifest
    report = commit_run(third)
    assert commit_run(third) == report
    again = plan_job(spec, DS)
    assert again.manifest == third.manifest
    engines = Engines()
    run_worker(again, start=engines)
    assert engines.num_answers == 0
    assert commit_run(again) == report


def test_a_chats_next_turn_begins_with_the_whole_last_conversation(tmp_path: Path) -> None:
    """So the plan says that all of its blocks are computed again."""
    write_table(tmp_path / "documents", document_rows(4, 3))
    asked = {"role": "user", "template": "{document} {query}"}
    replied = {"role": "assistant", "template": "{reply}"}
    turns = [asked, replied, {"role": "user", "template": "Why?"}]
    model = build_tokenizer(tmp_path / "model")
    spec = several(
        tmp_path,
        {"reply": {"turns": [asked]}, "why": {"turns": turns}},
        model={"path": str(model)},
        engine={"backend": "fake", "extra_args": {"byte_tokens": False}},
    )
    first, second = run_job(spec), plan_job(spec, DS)
    last = {asks[0] // 2: ids for ids, asks in asks_of(first)}
    tokenizer, num_begun = load_tokenizers(spec, DS)[0], 0
    for ids, asks in asks_of(second):
        begin = last[asks[0] // 2]
        assert ids[: len(begin)] == begin
        rest = tokenizer.decode(ids[len(begin) :])
        assert rest.startswith(fake_text(begin)) and "Why?" in rest
        num_begun += 1
    assert num_begun == 12
    blocks = {tuple(ids[:end]) for ids in last.values() for end in range(16, len(ids) + 1, 16)}
    assert second.manifest.num_repeated_tokens == 16 * len(blocks)
    shown = f"round 2 of 2: why; {16 * len(blocks):,} prompt tokens computed again"
    assert shown in format_plan(second.manifest, second.folder.uri)


class StoppedError(Exception):
    """In place of a signal."""


def stop() -> None:
    raise StoppedError


def test_a_run_that_is_stopped_in_the_second_round_goes_on_there(spec: JobSpec) -> None:
    first = run_job(spec)
    second = plan_job(spec, DS)
    with pytest.raises(StoppedError):
        run_worker(second, start=Engines(7, stop))
    assert plan_job(spec, DS).manifest == second.manifest
    engines = Engines()
    run_worker(second, start=engines)
    assert 0 < engines.num_answers < second.manifest.counts.num_requests
    engines = Engines()
    run_worker(first, start=engines)
    assert engines.num_answers == 0
    commit_run(run_job(spec))
    assert texts(spec) == by_hand(document_rows())


def test_a_plan_or_a_commit_that_is_stopped_is_made_again(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_job(spec)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(plan_module, "complete", lambda *_: stop())
        plan_job(spec, DS)
    assert newest_plan_uri(spec, DS) == first.folder.uri
    run_job(spec)
    last = run_job(spec)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(commit_module, "_publish", lambda *_: stop())
        commit_run(last)
    assert first.superseded_by() == last.manifest.plan_id
    assert plan_job(spec, DS).manifest == last.manifest
    commit_run(last)
    assert texts(spec) == by_hand(document_rows())


def test_a_prompt_is_skipped_where_an_answer_that_it_needs_has_failed(tmp_path: Path) -> None:
    rows = document_rows()
    rows[3]["document"] = None
    write_table(tmp_path / "documents", rows)
    prompts = {
        "count": {
            "template": "{document} Count {query}",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "type": "object",
                    "properties": {"n": {"type": ["integer", "null"]}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
        },
        "other": {"template": "{query} {row_key}", "when": "count.n is null"},
        "more": {"template": "{query}: {count.n}", "when": "count.num_output_tokens > 0"},
    }
    spec = several(tmp_path, prompts, max_failed_fraction=1.0)
    report = run_all(spec)
    found = rows_by_key(spec)
    rejected = found[rows[3]["row_key"]]
    assert rejected["count"]["status"] == "rejected"
    assert {rejected[name]["status"] for name in ("other", "more")} == {"skipped"}
    values = {key: row["count"]["n"] for key, row in found.items()}
    assert None in values.values()
    assert len(set(values.values())) > 2
    for key, row in found.items():
        if key == rows[3]["row_key"]:
            continue
        is_null = values[key] is None
        assert (row["other"]["status"] == "skipped") == (not is_null)
        if is_null:  # is placed nowhere
            assert row["more"]["error"] == {
                "kind": "null_value",
                "message": "column 'count.n' is null",
            }
        else:
            assert row["more"]["error"] is None
    num_null = sum(value is None for value in values.values()) - 1
    assert report.errors_by_kind == {"null_value": 1 + num_null}
    failed = find_failed_rows(report.plan_uri, 100)
    assert failed.num_failed_rows == 1 + num_null
    assert failed.num_rows == failed.num_rows_done == report.plan.num_asked_rows


def test_when_over_columns_of_the_input_needs_no_later_round(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    prompts = {
        "a": {"template": "{document} {query}", "when": "query == 'question 1'"},
        "b": {"template": "{document} {query}", "when": "query in ['question 2', 'question 3']"},
    }
    spec = several(tmp_path, prompts)
    assert spec.rounds == ((0, 1),)
    plan = plan_job(spec, DS)
    counts = plan.manifest.counts
    assert (counts.num_rows, counts.num_asked_rows, counts.num_rejected_rows) == (60, 18, 0)
    assert "42 answers skipped" in format_plan(plan.manifest, plan.folder.uri)
    assert run_all(spec).num_rounds == 1
    for row in document_rows():
        found = rows_by_key(spec)[row["row_key"]]
        is_asked = (row["query"] == "question 1", row["query"] in ("question 2", "question 3"))
        assert tuple(found[name]["status"] != "skipped" for name in "ab") == is_asked


def test_few_failures_of_those_asked_are_too_many(tmp_path: Path) -> None:
    rows = document_rows()
    for row in rows[:3]:
        row["document"] = None
    write_table(tmp_path / "documents", rows)
    prompts = {
        f"p{number}": {"template": "{document}", "when": f"query == 'question {number}'"}
        for number in range(5)
    }
    with pytest.raises(FailedRowsError, match="3 of 30 answers failed"):
        plan_job(several(tmp_path, prompts), DS)


def test_later_rounds_read_what_the_first_has_read(lake: Lake, tmp_path: Path) -> None:
    lake.append(DS, pa.Table.from_pylist(document_rows()))
    spec = several(tmp_path, PROMPTS, input={"uri": lake.address})
    first = run_job(spec)
    lake.append("2026-12-31", pa.Table.from_pylist(document_rows(1, 1)))
    second = run_job(spec)
    assert second.manifest.input_version == first.manifest.input_version
    lake.append(DS, pa.Table.from_pylist([{**document_rows()[0], "row_key": "new"}]))
    if not lake.has_versions:
        with pytest.raises(TableError, match=r"has read is gone.* remove that folder"):
            plan_job(spec, DS)
        return
    commit_run(run_job(spec))
    assert texts(spec) == by_hand(document_rows())
    assert plan_job(spec, DS).manifest.round_idx == 0  # of the table as it is now
    assert open_lake(lake).snapshot(DS).version != first.manifest.input_version


def test_gc_keeps_the_rounds_that_a_later_one_needs(spec: JobSpec) -> None:
    first, second = run_job(spec), plan_job(spec, DS)
    made_at = max(path.stat().st_mtime for path in Path(first.folder.path).rglob("*"))
    old = {second.folder.path: made_at + 100.0}

    def kept(before: float) -> list[str]:
        garbage, found = find_garbage(spec, before=before)
        assert not {each.folder.path for each in garbage} & {each.folder.path for each in found}
        return [each.why for each in found if each.folder.path == first.folder.path]

    for path in Path(second.folder.path).rglob("*"):
        os.utime(path, (old[second.folder.path],) * 2)
    assert kept(made_at + 50.0) == ["a later round needs its outputs"]
    run_worker(second)
    commit_run(run_job(spec))
    assert kept(made_at + 50.0) == []


def changed(folder: Path, name: str, **fields: Any) -> JobSpec:
    return several(folder, {**PROMPTS, name: {**PROMPTS[name], **fields}})


@pytest.mark.parametrize("is_published", [False, True])
def test_rounds_before_a_changed_prompt_are_taken_over(
    spec: JobSpec, tmp_path: Path, is_published: bool
) -> None:
    plans = [run_job(spec) for _ in spec.rounds]
    if is_published:
        commit_run(plans[-1])
    other = changed(tmp_path, "summary", template="{document}\n\nBriefly:")
    engines, again = Engines(), list[StoredPlan]()
    for _ in range(2):
        again.append(plan_job(other, DS))
        run_worker(again[-1], start=engines)
    assert [plan.manifest.round_idx for plan in again] == [1, 2]
    assert again[0].manifest.before == plans[0].manifest.plan_id
    assert engines.num_answers == sum(plan.manifest.counts.num_requests for plan in again)
    report = commit_run(again[-1])
    assert report.num_rounds == 3
    found, wanted = rows_by_key(other), by_hand(document_rows())
    for row in document_rows():
        answers = found[row["row_key"]]
        assert answers["topic"]["generated_text"] == wanted[row["row_key"]]["topic"]
        if answers["summary"]["status"] != "skipped":
            text = fake_text(f"{row['document']}\n\nBriefly:".encode())
            assert answers["summary"]["generated_text"] == text
    assert plan_job(other, DS).manifest == again[-1].manifest
    # The first round's answers are gone: all is asked again, in the same plan.
    for folder in Path(plans[0].folder.path).glob("runs/*/attempt-*"):
        shutil.rmtree(folder)
    back = plan_job(spec, DS)
    assert (back.manifest.round_idx, back.folder.uri) == (0, plans[0].folder.uri)


def test_a_round_that_has_begun_goes_on_though_a_later_prompt_has_changed(
    spec: JobSpec, tmp_path: Path
) -> None:
    with pytest.raises(StoppedError):
        run_worker(first := plan_job(spec, DS), start=Engines(7, stop))
    plan = plan_job(other := changed(tmp_path, "title", when="topic == 'cars'"), DS)
    assert (plan.folder.uri, plan.manifest.spec) == (first.folder.uri, other)
    run_worker(plan, start=(engines := Engines()))
    assert 0 < engines.num_answers < plan.manifest.counts.num_requests


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("topic", {"template": "{document} {query}"}),
        ("summary", {"task": "classify", "labels": ["y", "n"], "when": "query != ''"}),
        ("title", {"sampling": {"logprobs": 1}}),
    ],
    ids=["its own prompt", "another prompt in the round", "parts with other columns"],
)
def test_a_round_that_changes_is_asked_again(
    spec: JobSpec, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    first = run_job(spec)
    again = plan_job(changed(tmp_path, name, **fields), DS).manifest
    assert again.round_idx == 0
    assert again.plan_id != first.manifest.plan_id
    assert plan_job(spec, DS).manifest.plan_id == first.manifest.plan_id


def test_a_published_round_of_other_rows_isnt_taken_over(spec: JobSpec, tmp_path: Path) -> None:
    run_all(spec)
    write_table(tmp_path / "documents", document_rows(3, 3))
    other = changed(tmp_path, "title", template="{topic}")
    assert plan_job(other, DS).manifest.round_idx == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"a": {"template": "{b}"}, "b": {"template": "{a}"}}, "prompts: a needs b needs a:"),
        ({"a": {"template": "{a}"}, "b": {"template": "{x}"}}, "prompts: a needs a:"),
        (
            {"a": {"template": "{x}"}, "b": {"template": "{x}", "when": "c.label == 'y'"}},
            r"prompts\.b\.when: there is no prompt 'c' whose label could be compared; .* a, b",
        ),
        (
            {"a": {"template": "{x}"}, "b": {"template": "{a.label}"}},
            r"prompts\.b: answers to a have no \.label; they have generated_text, ",
        ),
        ({"a": {"template": "{x}", "when": "x =="}}, r"prompts\.a\.when: isn't a condition"),
    ],
)
def test_answers_that_can_not_be_had_are_refused_with_the_spec(
    prompts: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        several("/lake", prompts)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            {"a": {"template": "{query}", "when": "qery == 'x'"}},
            r"a\.when: table .* no column 'qery'",
        ),
        (
            {"a": {"template": "{query}"}, "b": {"template": "{query}", "when": "a > 3"}},
            r"prompts\.b\.when: table .*: column 'a' holds string, which can't be compared",
        ),
        (
            {"a": {"template": "{query}"}, "b": {"template": "{a.error}"}},
            r"prompts\.b\.template: column 'a\.error' .* holds struct",
        ),
    ],
)
def test_answers_and_columns_of_the_wrong_kind_are_refused_by_the_plan(
    prompts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_table(tmp_path / "documents", document_rows())
    with pytest.raises((SpecError, TableError), match=message):
        plan_job(several(tmp_path, prompts), DS)


def test_outputs_of_all_rounds_are_reused(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    write_table(tmp_path / "documents", document_rows(), ds="2026-02-01")
    spec = several(tmp_path, PROMPTS, reuse_outputs=True)
    run_all(spec)
    next_day = "2026-02-01"
    for number in range(3):
        plan = plan_job(spec, next_day)
        assert (plan.manifest.round_idx, plan.manifest.counts.num_requests) == (number, 0)
        run_worker(plan)
    report = commit_run(plan)
    assert report.plan.num_reused_rows == report.plan.num_asked_rows > 30
    answers = {
        key: {name: row[name]["generated_text"] for name in PROMPTS}
        for key, row in rows_by_key(spec, next_day).items()
    }
    assert answers == by_hand(document_rows())
