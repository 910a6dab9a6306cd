"""A plan of the rows that failed in a published one."""

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import Batchllm
from support.answers_job import asking
from support.fake_job import DS, document_rows, fake_spec, finish, write_table
from support.lake_tables import LAKES
from support.prompts_job import several

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.engine import Engine, EngineJob, start_engine
from batchllm_operator.errors import ExitCode, PlanError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job, retry_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.rounds import INPUT_FILE
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan

FAULTY = {"backend": "fake", "extra_args": {"error_token_id": 7}}


def put(folder: Path, num_documents: int = 4) -> list[dict[str, Any]]:
    """Rows in input order: the engine fails at two equal ones; the third is null."""
    first, _, third, *others = document_rows(num_documents, 3)
    bad = {**first, "query": "\a"}
    rows = [bad, {**bad, "row_key": "again"}, {**third, "document": None}, *others]
    write_table(folder / "documents", rows)
    return rows


def published(spec: JobSpec) -> dict[str, dict[str, Any]]:
    table = open_table(spec.output.uri, spec.input.partition_column)
    batches = table.scan(table.snapshot(DS), ["row_key", *spec.output_columns])
    return {row.pop("row_key"): row for batch in batches for row in batch.to_pylist()}


def healed(spec: JobSpec, job: EngineJob) -> Engine:
    """The engine without its fault."""
    engine = spec.engine.model_copy(update={"extra_args": {"byte_tokens": True}})
    return start_engine(spec.model_copy(update={"engine": engine}), job)


def retried(report: RunReport) -> tuple[StoredPlan, RunReport]:
    plan = retry_job(report.plan_uri)
    run_worker(plan, start=healed)
    return plan, commit_run(plan)


def test_only_what_failed_is_asked_again_and_other_outputs_stay(tmp_path: Path) -> None:
    rows = put(tmp_path)
    spec = fake_spec(tmp_path, engine=FAULTY, max_failed_fraction=0.5)
    report = finish(plan_job(spec, DS))
    assert report.errors_by_kind == {"engine_error": 2, "null_value": 1}
    assert report.retry == f"batchllm job --retry {shlex.quote(report.plan_uri)}"
    before = published(spec)
    write_table(tmp_path / "documents", document_rows(1, 1), "2026-02-01")  # another day
    plan, after = retried(report)
    assert plan.manifest.counts.num_requests == 1, "the equal rows that failed"
    assert (after.plan.num_reused_rows, after.plan.num_rejected_rows) == (len(rows) - 3, 1)
    assert after.errors_by_kind == {"null_value": 1}
    assert after.retry is None, "a null stays one"
    now = published(spec)
    assert {row["run_id"] for row in now.values()} == {plan.publication.run_id}
    same = ("generated_text", "finish_reason", "num_output_tokens", "error", "status")
    for key, row in before.items():
        is_same = [row[name] == now[key][name] for name in same]
        assert all(is_same) == (key not in ("d0-q0", "again")), key
    assert now["again"]["generated_text"] == now["d0-q0"]["generated_text"]
    assert plan_job(spec, DS).folder == plan.folder, "the day again doesn't bring failures back"
    assert retry_job(report.plan_uri).folder == plan.folder
    third, last = retried(after)
    assert (last.plan.num_reused_rows, third.manifest.shards) == (len(rows) - 1, ())
    assert plan_job(spec, DS).folder == third.folder
    assert {k: v["generated_text"] for k, v in published(spec).items()} == {
        k: v["generated_text"] for k, v in now.items()
    }


def test_answers_of_several_prompts_and_labels_are_kept_with_their_figures(tmp_path: Path) -> None:
    put(tmp_path)
    engine = {"backend": "fake", "extra_args": {"byte_tokens": True, "error_token_id": 7}}
    labels = {"task": "classify", "labels": ["yes", "no"], "max_failed_fraction": 0.5}
    spec = asking(tmp_path, **labels, engine=engine)
    report = finish(plan_job(spec, DS))
    _, after = retried(report)
    assert sum(report.answers.counts["label"].values()) == 9
    assert sum(after.answers.counts["label"].values()) == 11, "those that were kept count, too"
    spec = several(tmp_path / "several", engine=FAULTY, max_failed_fraction=0.5)
    put(tmp_path / "several")
    report = finish(plan_job(spec, DS))
    prompts = [row.prompt for row in report.failed_rows if row.kind == "engine_error"]
    assert len(prompts) == report.errors_by_kind["engine_error"] and set(prompts) <= {*spec.prompts}
    plan, after = retried(report)
    assert "engine_error" not in after.errors_by_kind
    num_kept = after.plan.num_asked_rows - after.plan.num_rejected_rows - len(prompts)
    assert plan.manifest.counts.num_reused_rows == num_kept


def test_the_input_is_the_one_that_was_read(tmp_path: Path) -> None:
    put(tmp_path)
    spec = fake_spec(tmp_path, engine=FAULTY, max_failed_fraction=0.5)
    report = finish(plan_job(spec, DS))
    put(tmp_path, num_documents=5)
    with pytest.raises(TableError, match=r"has read is gone.*plan without --retry"):
        retry_job(report.plan_uri)
    newer = finish(plan_job(spec, DS))
    with pytest.raises(TableError, match=r"isn't what plan .* published"):
        retry_job(report.plan_uri)
    assert retried(newer)[1].errors_by_kind == {"null_value": 1}


@pytest.mark.parametrize("name", ["delta", "iceberg"])
def test_a_table_that_has_gone_on_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lake = LAKES[name](str(tmp_path), tmp_path, monkeypatch, "rows")
    rows = put(tmp_path / "local")
    lake.append(DS, pa.Table.from_pylist(rows))
    of_lake = {"input": {"uri": lake.address}, "engine": FAULTY, "max_failed_fraction": 0.5}
    report = finish(plan_job(fake_spec(tmp_path, **of_lake), DS))
    lake.append(DS, pa.Table.from_pylist([{**rows[5], "row_key": "new"}]))
    plan, after = retried(report)
    assert (after.num_rows_in, after.errors_by_kind) == (len(rows), {"null_value": 1})
    assert plan.manifest.counts.num_requests == 1


def test_plans_whose_rows_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    put(tmp_path)
    prompts = {
        "topic": {"template": "{document}|{query}"},
        "summary": {"template": "{document} {topic}"},
    }
    spec = several(tmp_path, prompts, engine=FAULTY, max_failed_fraction=0.5)
    run_worker(plan_job(spec, DS))
    report = finish(plan_job(spec, DS))
    assert report.num_failed_rows > report.plan.num_rejected_rows and report.retry is None
    with pytest.raises(PlanError, match="some prompts need answers to others"):
        retry_job(report.plan_uri)


def test_parts_that_are_gone_are_named(tmp_path: Path) -> None:
    put(tmp_path)
    report = finish(plan_job(fake_spec(tmp_path, engine=FAULTY, max_failed_fraction=0.5), DS))
    for part in Path(report.plan_uri).glob("runs/*/attempt-*/part-*"):
        part.unlink()
    with pytest.raises(PlanError, match=r"unfinished: shard 0.*leave --retry out"):
        retry_job(report.plan_uri)


def test_the_command_of_a_report_retries(tmp_path: Path, batchllm: Batchllm) -> None:
    put(tmp_path)
    spec = fake_spec(tmp_path, engine=FAULTY, max_failed_fraction=0.5)
    report = finish(plan_job(spec, DS))
    assert report.retry is not None
    _, _, *words = shlex.split(report.retry)
    result = tmp_path / "result.json"
    done = batchllm("plan", *words, "--result", result)
    assert done.code == 0, done.err
    assert "9 rows reuse an output" in done.out
    assert json.loads(result.read_text())["num_reused_rows"] == 9
    assert Path(json.loads(result.read_text())["plan_uri"], INPUT_FILE).exists()
    assert batchllm("failed", "--plan", report.plan_uri).out.endswith(f" again: {report.retry}\n")
    for wrong in (("--ds", DS), ("--advise",)):
        assert batchllm("plan", *words, *wrong).code == ExitCode.INVALID
