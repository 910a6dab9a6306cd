"""What a commit says of its run: gathered from parts, attempts, traces and the plan."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import document_rows, expected_prompt, fake_spec, finish, planned, write_table
from support.run_reports import make_timeline
from support.staged_job import run_only

from batchllm_operator.commit import report as run_report
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.report import load_report, store_page
from batchllm_operator.engine import Engine, EngineJob
from batchllm_operator.errors import EngineError, PlanError, StorageError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report.page import render_report
from batchllm_operator.report.summary import format_summary
from batchllm_operator.row_error import RowError
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards import row_errors
from batchllm_operator.shards.attempts import PROGRESS_FILE, ShardProgress, attempt_name
from batchllm_operator.shards.job_status import read_attempts
from batchllm_operator.shards.reports import COMMITTED_FILE
from batchllm_operator.shards.row_errors import RowErrors
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.run_report import PAGE_FILE, RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.stored_plan.timeline import Timeline


def commit_job(lake: Path, rows: list[dict[str, Any]], **changes: Any) -> RunReport:
    return finish(planned(lake, rows, **changes))


def test_tokens_and_shards_add_up_and_without_a_gpu_there_is_no_bill(tmp_path: Path) -> None:
    rows = document_rows(8, 5)
    rows[11] = {**rows[20], "row_key": "a duplicate"}
    report = commit_job(tmp_path, rows)
    done, runs = report.done, [shard.done for shard in report.shards]
    tokens = [len(expected_prompt(row)) for row in rows]
    assert done.num_logical_tokens == report.plan.num_logical_tokens == sum(tokens)
    assert done.num_duplicate_tokens > 0 and done.num_cached_tokens > 0
    assert done.num_output_tokens == 39 * 8
    assert [shard.shard_idx for shard in report.shards] == [0, 1]
    assert done == Counts.total(runs)
    assert (done.num_rows, done.num_requests) == (40, report.plan.num_requests)
    assert {shard.num_attempts for shard in report.shards} == {1}
    # One engine keeps what neighbouring shards share.
    assert report.planned_saving is not None and report.optimal_saving is not None
    assert report.achieved_saving is not None
    assert report.planned_saving <= report.achieved_saving <= report.optimal_saving
    assert len(report.sample_rows) == 3
    assert (report.bill.gpu_s, report.bill.cost_usd, report.timelines) == (None, None, ())


def test_the_bill_counts_gpus_of_all_attempts(tmp_path: Path) -> None:
    plan = planned(tmp_path, document_rows())

    def start(spec: JobSpec, job: EngineJob) -> Engine:
        time.sleep(0.2)  # of two GPUs
        raise EngineError("no device")

    with pytest.raises(EngineError):
        run_worker(plan, num_gpus=2, start=start)
    run_worker(plan, num_gpus=2)
    report = commit_run(plan.folder.uri)
    assert report.bill.gpu_s is not None
    known = [shard.gpu_s for shard in report.shards if shard.gpu_s is not None]
    assert report.bill.gpu_s == pytest.approx(sum(known))
    assert [shard.num_attempts for shard in report.shards] == [2, 1]
    held = [read_attempts(plan)[idx].progress for idx in range(2)]
    assert [len(each) for each in held] == [2, 1]
    assert known == [pytest.approx(sum(one.gpu_s for one in each), abs=0.1) for each in held]
    assert known[0] > 0


def test_an_attempt_that_left_no_sign_leaves_the_bill_open(tmp_path: Path) -> None:
    plan = planned(tmp_path, document_rows())
    run_worker(plan, num_gpus=2)
    (plan.run_folder(1).child("attempt-00001")).remove("progress.json")
    report = commit_run(plan.folder.uri)
    assert report.bill.gpu_s is None
    assert report.shards[0].gpu_s is not None and report.shards[1].gpu_s is None


def note_worker(plan: StoredPlan, shard_idx: int, attempt: int, **changes: Any) -> None:
    """Make an attempt that of a worker."""
    folder = plan.run_folder(shard_idx).child(attempt_name(attempt))
    progress = ShardProgress.from_bytes(folder.read_bytes(PROGRESS_FILE), source="x")
    changed = progress.model_copy(update={"attempt": attempt, **changes})
    folder.write_bytes(PROGRESS_FILE, changed.model_dump_json().encode())


def test_workers_are_counted_and_their_engines_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 4 runs shards 2 and 1, also begun by another 4; shard 0 has left no sign."""
    plan = planned(tmp_path, document_rows(9, 5), planner={"num_shards": 3})

    def start(spec: JobSpec, job: EngineJob) -> Engine:
        raise EngineError("no device")

    with pytest.raises(EngineError):
        run_only(plan, 1, start=start)
    for shard_idx in (0, 2, 1):
        run_only(plan, shard_idx)
    plan.run_folder(0).child(attempt_name(1)).remove(PROGRESS_FILE)
    note_worker(plan, 1, 1, worker=4, host="a")
    note_worker(plan, 1, 2, worker=4, host="b")
    note_worker(plan, 2, 1, worker=4, host="b")
    read: list[tuple[int, int, int]] = []

    def read_timeline(folder: Folder, began: ShardProgress) -> Timeline:
        assert folder.uri == plan.run_folder(began.shard_idx).uri
        read.append((began.shard_idx, began.attempt, began.worker))
        return make_timeline(began.shard_idx, worker=began.worker)

    monkeypatch.setattr(run_report, "read_timeline", read_timeline)
    report = commit_run(plan.folder.uri)
    assert [shard.worker for shard in report.shards] == [None, 4, 4]
    assert report.num_workers == 1 and "of generating by 1 worker" in format_summary(report)
    assert read == [(2, 1, 4)]
    assert [line.name for line in report.timelines] == ["worker 4, from shard 2"]
    assert load_report(report.plan_uri) == report


def test_what_the_plan_knew_of_sharing_is_in_it(tmp_path: Path) -> None:
    report = commit_job(tmp_path, document_rows(6, 5))
    sharing = report.sharing
    assert sum(sharing.share_degrees.counts) == report.plan.num_requests == 30
    assert sum(sharing.prefix_lengths.counts) == report.plan.num_shared_groups
    largest = sharing.largest_groups[0]
    assert largest.num_saved_tokens == largest.num_prefix_tokens * (largest.num_requests - 1)
    assert any("document" in group.first_words for group in sharing.largest_groups)


def test_errors_have_the_keys_of_their_first_rows(tmp_path: Path) -> None:
    rows = document_rows(8, 5)
    for idx in (3, 7, 20, 33):
        rows[idx] = {**rows[idx], "document": None}
    rows[5] = {**rows[5], "document": "too long " * 1000}
    report = commit_job(tmp_path, rows, max_failed_fraction=0.5)
    nulls, long = report.errors
    assert (nulls.kind, nulls.num_rows) == ("null_value", 4)
    assert [key["row_key"] for key in nulls.example_keys] == [
        rows[idx]["row_key"] for idx in (3, 7, 20)
    ]
    assert nulls.example_error == "null_value: column 'document' is null"
    assert (long.kind, long.num_rows) == ("prompt_too_long", 1)
    assert long.example_keys == ({"row_key": rows[5]["row_key"]},)
    assert report.errors_by_kind == {"null_value": 4, "prompt_too_long": 1}


def test_kinds_of_errors_are_cut_and_have_their_first_rows_whatever_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = RowErrors()
    errors.add(RowError("engine_error", "b"), [9, 30])
    errors.add(RowError("engine_error", "a"), [4])
    errors.add(RowError("engine_error", "long " * 500), [2])
    errors.add(RowError("other"), [1])
    rows = document_rows(8, 5)
    plan = planned(tmp_path, rows)
    engine, other = errors.kinds(plan)
    assert (engine.num_rows, other.kind, errors.num_rows) == (4, "other", 5)
    keys = [key["row_key"] for key in engine.example_keys]
    assert keys == [rows[idx]["row_key"] for idx in (2, 4, 9)]
    assert len(engine.example_error) == 300
    monkeypatch.setattr(row_errors, "_NUM_KINDS", 1)
    assert [each.kind for each in errors.kinds(plan)] == ["engine_error"]


def test_committing_again_keeps_the_report_and_brings_the_page_back(tmp_path: Path) -> None:
    report = commit_job(tmp_path, document_rows())
    page = Path(report.plan_uri) / PAGE_FILE
    (Path(report.plan_uri) / "committed.json").unlink()
    page.unlink()
    assert commit_run(report.plan_uri) == report
    assert page.exists()


def test_the_note_of_a_commit_is_written_after_the_report_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a commit that is killed before the note leaves out, the next one writes."""
    plan, write_bytes = planned(tmp_path, document_rows()), Folder.write_bytes
    run_worker(plan)

    def write(folder: Folder, name: str, data: bytes) -> None:
        if name == COMMITTED_FILE:
            raise KeyboardInterrupt
        write_bytes(folder, name, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Folder, "write_bytes", write)
        commit_run(plan)
    published = load_report(plan.folder.uri)
    assert plan.folder.exists(PAGE_FILE)
    assert commit_run(plan) == published
    assert plan.folder.exists(COMMITTED_FILE)


def test_a_page_that_is_as_it_should_be_is_not_written_again(tmp_path: Path) -> None:
    report = commit_job(tmp_path, document_rows())
    page = Path(report.plan_uri) / PAGE_FILE
    before = page.stat().st_mtime_ns
    store_page(Folder.open(report.plan_uri), report)
    assert page.stat().st_mtime_ns == before
    page.write_text("drawn by another release")
    store_page(Folder.open(report.plan_uri), report)
    assert page.read_text() == render_report(report)


def test_a_page_that_cannot_be_made_costs_a_warning_not_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(report: RunReport) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("batchllm_operator.report.page.render_report", fail)
    with caplog.at_level(logging.WARNING):
        report = commit_job(tmp_path, document_rows())
    assert report.num_rows_out == 30
    assert "report.html isn't written: RuntimeError('no fonts')" in caplog.text
    assert not (Path(report.plan_uri) / PAGE_FILE).exists()


def test_a_commit_needs_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: StoredPlan) -> None:
        raise StorageError("no access")

    monkeypatch.setattr(run_report, "read_attempts", fail)
    report = commit_job(tmp_path, document_rows())
    assert report.bill.gpu_s is None
    assert "what its attempts took isn't known: no access" in caplog.text


def test_a_report_that_was_removed_is_made_again(tmp_path: Path) -> None:
    report = commit_job(tmp_path, document_rows())
    Path(report.report_uri).unlink()
    with pytest.raises(PlanError, match="removed since; commit writes it"):
        load_report(report.plan_uri)
    again = commit_run(report.plan_uri)
    assert again == report.model_copy(update={"committed_at": again.committed_at})


def test_where_all_is_reused_the_bill_is_known_to_be_nothing(tmp_path: Path) -> None:
    rows = document_rows()
    commit_job(tmp_path, rows, reuse_outputs=True)
    write_table(tmp_path / "documents", rows, "2026-02-01")
    plan = plan_job(fake_spec(tmp_path, reuse_outputs=True), "2026-02-01")
    report = commit_run(plan.folder.uri)
    assert report.plan.num_reused_rows == len(rows) and report.shards == ()
    assert report.bill.gpu_s == 0
    assert report.figures()["achieved_saving_ratio"] is None


def test_failed_rows_are_dealt_to_kinds_in_turn_and_lie_by_kind(tmp_path: Path) -> None:
    rows = document_rows(8, 5)
    for idx in range(0, 40, 2):
        rows[idx] = {**rows[idx], "document": None}
    rows[5] = {**rows[5], "document": "too long " * 1000}
    report = commit_job(tmp_path, rows, max_failed_fraction=1.0)
    shown = [(row.kind, row.key["row_key"]) for row in report.failed_rows]
    nulls = [("null_value", rows[idx]["row_key"]) for idx in range(0, 40, 2)]
    assert shown == [*nulls, ("prompt_too_long", rows[5]["row_key"])]
    assert report.failed_rows[0].message == "column 'document' is null"
    assert "too long too long" not in Path(report.report_uri).read_text()
    assert report.retry is None, "planning has rejected them all"
    errors = RowErrors(4)
    errors.add(RowError("a"), list(range(10)))
    errors.add(RowError("b", "x"), [7])
    plan = StoredPlan.open(report.plan_uri)
    few = errors.rows_by_kind(plan)
    keys = [rows[idx]["row_key"] for idx in (0, 1, 2, 7)]
    assert [(row.kind, row.key["row_key"]) for row in few] == list(zip("aaab", keys, strict=True))


def test_what_earlier_partitions_cost_is_read_from_their_reports(tmp_path: Path) -> None:
    reports = {}
    for day in ("2026-01-29", "2026-01-30", "2026-01-31"):
        write_table(tmp_path / "documents", document_rows(), day)
        plan = plan_job(fake_spec(tmp_path), day)
        run_worker(plan, num_gpus=2)
        reports[day] = commit_run(plan)
        if day == "2026-01-29":
            plan.folder.write_bytes("report.json", b"{}")
    first, second, third = reports.values()
    assert (first.earlier, second.earlier) == ((), ())
    assert third.earlier == (second.as_earlier(),)
    [before] = third.earlier
    assert (before.ds, before.num_rows, before.cost_usd) == ("2026-01-30", 30, None)
    assert before.gpu_s == second.bill.gpu_s is not None
    assert second.bill.start_gpu_s is not None and second.bill.start_gpu_s <= second.bill.gpu_s
    assert [(bar.worker, bar.attempt) for bar in third.work] == [(0, 1), (0, 1)]
    page = (Path(third.plan_uri) / PAGE_FILE).read_text()
    assert "Cost by partition" in page and "Workers over time" in page and "Prefix tree" in page
