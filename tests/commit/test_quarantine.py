"""`on_unmet: quarantine`: each row is published or quarantined, whenever commit is stopped."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Batchllm
from support.answers_job import TYPED, asking, published
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.lake_tables import LAKES
from support.prompts_job import several

from batchllm_operator.commit import commit_run as stage
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import ExpectationError, SpecError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_summary
from batchllm_operator.report.page import render_report
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.quarantine import quarantine_of
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

CHOICE: dict[str, Any] = {"type": "choice", "choices": ["a", "b"]}
NO_B: dict[str, Any] = {"generated_text": {"matches": {"^a$": {"min": 1}}}}
MakeSpec = Callable[..., JobSpec]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(params=list(LAKES))
def make_spec(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeSpec:
    lake = LAKES[request.param](str(tmp_path), tmp_path, monkeypatch, "answers")
    write_table(tmp_path / "documents", document_rows(4, 5))

    def make(**changes: Any) -> JobSpec:
        fields = {"on_unmet": "quarantine", "max_failed_fraction": 0.9, "expect": NO_B}
        output = {"uri": lake.address, "staging_uri": lake.staging}
        return asking(tmp_path, response_format=CHOICE, output=output, **{**fields, **changes})

    return make


def finished(spec: JobSpec) -> StoredPlan:
    run_worker(plan := plan_job(spec, DS))
    return plan


def commit_killed(plan: StoredPlan) -> None:
    """Commit until the rows at fault are in quarantine."""

    def kill(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(stage, "_publish", kill)
        commit_run(plan)
        raise AssertionError("it wasn't killed")


def quarantined(spec: JobSpec) -> list[dict[str, Any]]:
    """The rows in quarantine that count: those whose `run_id` is in the output table."""
    output = open_table(spec.output.uri, "ds")
    runs = {row["run_id"] for row in published(spec)} if DS in output.partitions() else set()
    table, rows = quarantine_of(spec, output), list[dict[str, Any]]()
    for run_id in runs & {*table.partitions()}:
        snapshot = table.snapshot(run_id)
        for batch in table.scan(snapshot, snapshot.schema.names):
            rows += batch.to_pylist()
    return rows


def test_rows_at_fault_go_to_a_second_table_and_the_others_are_published(
    make_spec: MakeSpec, batchllm: Batchllm
) -> None:
    plan = finished(spec := make_spec())
    done = batchllm("commit", "--plan", plan.folder.uri)
    assert done.code == 0
    kept, apart = published(spec), quarantined(spec)
    assert {row["generated_text"] for row in kept} == {"a"}
    assert {row["generated_text"] for row in apart} == {"b"}
    keys = [row["row_key"] for row in document_rows(4, 5)]
    assert [row["row_key"] for row in kept + apart] == sorted(
        keys, key=lambda key: (key in {row["row_key"] for row in apart}, keys.index(key))
    )
    run_id = plan.publication.run_id
    assert all((row["run_id"], row["ds"]) == (run_id, DS) for row in apart)
    assert all(row["unmet"] == ["generated_text: matches.^a$"] for row in apart)
    assert apart[0].keys() == {*open_table(spec.output.uri, "ds").snapshot(DS).schema.names} | {
        "unmet"
    }
    report = load_report(plan.folder.uri)
    [measured] = report.expectations
    assert measured.value == len(kept) / 20
    assert report.num_quarantined_rows == len(apart)
    assert f"{len(apart)} of them at fault, in " in done.out
    for text in (format_summary(report), render_report(report)):
        assert f"{len(apart)} rows" in text and report.quarantine_uri in text
    # A task that is cleared, and one that was stopped before its notes.
    assert commit_run(plan) == report
    for name in ("report.json", "committed.json"):
        plan.folder.remove(name)
    assert commit_run(plan).expectations == report.expectations
    assert (published(spec), quarantined(spec)) == (kept, apart)


def test_a_commit_that_is_killed_between_the_tables_shows_readers_what_was_before(
    make_spec: MakeSpec,
) -> None:
    every_row = Counter(row["row_key"] for row in document_rows(4, 5))

    def seen(spec: JobSpec) -> Counter[str]:
        return Counter(row["row_key"] for row in published(spec) + quarantined(spec))

    first = finished(spec := make_spec())
    commit_killed(first)
    assert not quarantined(spec)
    assert DS not in open_table(spec.output.uri, "ds").partitions()
    commit_run(first)
    assert seen(spec) == every_row
    before = published(spec), quarantined(spec)
    # Other answers, of which other rows are at fault, replace these.
    other = make_spec(prompt={"template": "{query} of {document}!"})
    second = finished(other)
    commit_killed(second)
    assert (published(spec), quarantined(spec)) == before
    report = commit_run(second)
    assert seen(other) == every_row
    after = published(other), quarantined(other)
    assert {row["row_key"] for row in after[1]} != {row["row_key"] for row in before[1]}
    assert commit_run(second) == report
    assert (published(other), quarantined(other)) == after


@pytest.mark.parametrize("met", ["^[ab]$", "^b$"], ids=["all", "the others"])
def test_bounds_that_are_mended_after_a_kill_decide_anew(make_spec: MakeSpec, met: str) -> None:
    commit_killed(finished(make_spec()))
    mended = make_spec(expect={"generated_text": {"matches": {met: {"min": 1}}}})
    commit_run(plan_job(mended, DS))
    texts = (
        {row["generated_text"] for row in rows} for rows in (published(mended), quarantined(mended))
    )
    assert list(texts) == ([{"a", "b"}, set()] if "a" in met else [{"b"}, {"a"}])
    assert len(published(mended) + quarantined(mended)) == 20


@pytest.mark.parametrize("changes", [{"on_unmet": "fail"}, {"on_unmet": "fail", "expect": {}}])
def test_rows_that_a_killed_commit_put_apart_do_not_count_beside_all_rows(
    make_spec: MakeSpec, changes: dict[str, Any]
) -> None:
    commit_killed(finished(make_spec()))
    spec = make_spec(**changes)
    commit_run(plan_job(spec, DS), accept=True)
    assert len(published(spec)) == 20
    assert not quarantined(spec)


def test_more_rows_at_fault_than_may_fail_are_quarantined_once_they_are_accepted(
    make_spec: MakeSpec,
) -> None:
    plan = finished(spec := make_spec(max_failed_fraction=0.05))
    with pytest.raises(ExpectationError, match=r"of 20 rows are at fault, too many to quarantine"):
        commit_run(plan)
    output = open_table(spec.output.uri, "ds")
    assert DS not in output.partitions()
    assert quarantine_of(spec, output).partitions() == []
    report = commit_run(plan, accept=True)
    assert len(quarantined(spec)) == report.num_quarantined_rows > 1
    none_is_right = make_spec(
        prompt={"template": "{query}"}, expect={"generated_text": {"matches": {"c": {"min": 1}}}}
    )
    with pytest.raises(ExpectationError, match=r"20 of 20 rows are at fault.*on_unmet: fail in"):
        commit_run(finished(none_is_right), accept=True)


def test_failed_rows_in_quarantine_are_listed(tmp_path: Path) -> None:
    rows = document_rows(4, 5)
    rows[3]["query"] = rows[5]["query"] = None
    write_table(tmp_path / "documents", rows)
    expect = {"status": {"values": {"rejected": {"max": 0.05}}}}
    limits = {"max_failed_fraction": 0.5, "on_unmet": "quarantine"}
    plan = finished(fake_spec(tmp_path, expect=expect, **limits))
    report = commit_run(plan)
    assert report.num_quarantined_rows == 2
    assert len(published(plan.manifest.spec)) == 18
    found = find_failed_rows(plan.folder.uri, 10)
    assert [row.key["row_key"] for row in found.rows] == [rows[idx]["row_key"] for idx in (3, 5)]
    assert found.errors_by_kind == {"null_value": 2}


def test_typed_columns_and_several_prompts(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(4, 5))
    options: dict[str, Any] = {"on_unmet": "quarantine", "max_failed_fraction": 0.9}
    expect = {"rating": {"missing": {"max": 0}}, "count": {"range": {"min": 0, "max": 1e9}}}
    spec = asking(tmp_path, response_format=TYPED, expect=expect, **options)
    commit_run(finished(spec), accept=True)
    assert all(row["rating"] is not None and 0 <= row["count"] <= 1e9 for row in published(spec))
    apart = quarantined(spec)
    assert apart
    for row in apart:
        faults = {"rating: missing": row["rating"] is None, "count: range.min": row["count"] < 0}
        faults["count: range.max"] = row["count"] > 1e9
        assert sorted(row["unmet"]) == sorted(name for name in faults if faults[name])
    prompts = {"topic": {"template": "{query}?{document}", "response_format": CHOICE}}
    prompts["more"] = {"template": "{document}", "when": "topic == 'a'"}
    two = several(
        tmp_path, prompts, output={"uri": f"{tmp_path}/two"}, **options,
        expect={"topic.generated_text": {"values": {"b": {"max": 0}}}},
    )  # fmt: skip
    run_worker(plan_job(two, DS))
    commit_run(finished(two))
    assert {row["topic"]["generated_text"] for row in published(two)} == {"a"}
    assert {row["topic"]["generated_text"] for row in quarantined(two)} == {"b"}


@pytest.mark.parametrize(
    ("column", "expected", "what"),
    [
        ("generated_text", {"duplicate": {"max": 0.3}}, "duplicate"),
        ("generated_text", {"drift": {"max": 0.1}}, "drift"),
        ("generated_text", {"quantiles": {"p50": {"min": 3}}}, "quantiles.p50"),
        ("generated_text", {"matches": {"a": {"min": 0.1, "max": 0.2}}}, "matches.a"),
        ("label", {"values": {"spam": {"max": 0.4}}}, "values.spam"),
        ("topic.status", {"values": {"ok": {"min": 0.4}}}, "values.ok"),
    ],
)
def test_bounds_that_name_no_row_are_refused_by_the_spec(
    column: str, expected: dict[str, Any], what: str
) -> None:
    message = f"expect.{column}.{what}: no row breaks it by itself, so none can be quarantined"
    with pytest.raises(SpecError, match=message):
        fake_spec("/lake", on_unmet="quarantine", expect={column: expected})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_unmet": "branch"}, "on_unmet: only Iceberg tables have branches"),
        ({"output": {"carry": ["unmet"]}}, "has a column unmet of its own"),
    ],
)
def test_jobs_that_cannot_have_it_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"on_unmet": "quarantine", "expect": NO_B, **changes}
    with pytest.raises(SpecError, match=message):
        fake_spec("/lake", **fields)


def test_a_quarantine_table_that_cannot_be_written_is_refused_by_plan(tmp_path: Path) -> None:
    write_table(tmp_path / "out_quarantine", document_rows())
    write_table(tmp_path / "documents", document_rows())
    options: dict[str, Any] = {"on_unmet": "quarantine", "expect": NO_B}
    with pytest.raises(TableError, match=r"out_quarantine: .* isn't partitioned by 'run_id'"):
        plan_job(fake_spec(tmp_path, **options), DS)
