"""`batchllm failed`, and the note that a refused commit leaves."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from conftest import Batchllm
from support.fake_job import DS, document_rows, fake_spec, job_fields, write_table
from support.lake_tables import Lake
from support.staged_job import Engines

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import FailedRow, find_failed_rows
from batchllm_operator.errors import (
    ExitCode,
    FailedRowsError,
    IncompleteRunError,
    Interrupted,
    PlanError,
    StorageError,
)
from batchllm_operator.inspect.gc import find_garbage, remove_garbage
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.reports import REFUSED_FILE, Refusal
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.run_report import ErrorKind
from batchllm_operator.stored_plan.stored_plan import StoredPlan

FAULTY = {"backend": "fake", "extra_args": {"error_token_id": 7}}
NULL = FailedRow({"row_key": "d1-q0"}, "null_value", "column 'document' is null")
ERROR = FailedRow({"row_key": "d0-q0"}, "engine_error", "error token in the prompt")


def faulty_rows() -> list[dict[str, Any]]:
    """Twelve rows: the engine fails at the first, and the second can't be prompted."""
    first, second, *others = document_rows(4, 3)
    return [{**first, "query": "\a"}, {**second, "document": None}, *others]


def failing_spec(lake: Path | str, **changes: Any) -> JobSpec:
    return fake_spec(lake, engine=FAULTY, **{"max_failed_fraction": 0.1, **changes})


def planned(lake: Path, **changes: Any) -> StoredPlan:
    write_table(lake / "documents", faulty_rows())
    return plan_job(failing_spec(lake, **changes), DS)


def run(plan: StoredPlan) -> StoredPlan:
    """Run the plan to its end, as if more rows were allowed to fail, which would end it early."""
    spec = plan.manifest.spec
    plan_job(spec.model_copy(update={"max_failed_fraction": 1.0}), DS)
    run_worker(plan.folder.uri)
    return plan_job(spec, DS)


def test_failed_rows_are_listed_as_they_come(tmp_path: Path) -> None:
    plan = planned(tmp_path, max_failed_fraction=0.5)
    before = find_failed_rows(plan.folder.uri, 10)
    assert (before.num_rows, before.num_rows_done, before.rows) == (12, 1, (NULL,))
    run(plan)
    uncommitted = find_failed_rows(plan.folder.uri, 10)
    assert uncommitted.rows == (ERROR, NULL), "in input order"
    assert uncommitted.errors_by_kind == {"engine_error": 1, "null_value": 1}
    assert (uncommitted.num_rows_done, uncommitted.is_committed) == (12, False)
    commit_run(plan.folder.uri)
    committed = find_failed_rows(plan.folder.uri, 10)
    assert committed.is_committed
    assert (committed.rows, committed.num_failed_rows) == (uncommitted.rows, 2)


def test_failed_rows_of_a_stopped_run_are_listed_though_no_part_is_written(tmp_path: Path) -> None:
    plan = planned(tmp_path, planner={"num_shards": 1, "part_rows": 500})

    def stop() -> None:
        raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_worker(plan, start=Engines(9, stop))
    found = find_failed_rows(plan.folder.uri, 10)
    assert found.num_rows_done == 10, "nine requests, and the rejected row"
    assert found.rows == (ERROR, NULL)
    run(plan)
    assert find_failed_rows(plan.folder.uri, 10).rows == (ERROR, NULL), "none is listed twice"


def test_failed_rows_of_a_published_plan_outlive_its_parts(lakes: tuple[Lake, Lake]) -> None:
    source, target = lakes
    source.append(DS, pa.Table.from_pylist(faulty_rows()))
    spec = failing_spec(
        "unused",
        input={"uri": source.address},
        output={"uri": target.address, "staging_uri": target.staging},
        max_failed_fraction=0.5,
    )
    plan = run(plan_job(spec, DS))
    commit_run(plan.folder.uri)
    garbage, _ = find_garbage(spec, before=time.time() + 10)
    remove_garbage(garbage)
    assert not list(plan.run_folder(0).find())
    found = find_failed_rows(plan.folder.uri, 1)
    assert (found.rows, found.num_failed_rows, found.num_rows_done) == ((ERROR,), 2, 12)


def test_failed_rows_of_a_replaced_plan_are_not_said_to_be_none(tmp_path: Path) -> None:
    spec = failing_spec(tmp_path, max_failed_fraction=0.5)
    old = run(planned(tmp_path, max_failed_fraction=0.5))
    commit_run(old.folder.uri)
    write_table(tmp_path / "documents", faulty_rows()[:6])
    commit_run(run(plan_job(spec, DS)).folder.uri)
    assert find_failed_rows(old.folder.uri, 10).rows == (ERROR, NULL)
    for shard_idx in range(2):
        for name in list(old.run_folder(shard_idx).find()):
            old.run_folder(shard_idx).remove(name)
    with pytest.raises(PlanError, match=r"its parts are gone; .*batchllm report --plan"):
        find_failed_rows(old.folder.uri, 10)


def test_the_first_rows_are_kept_however_they_come(tmp_path: Path) -> None:
    rows = [{**row, "query": "\a", "row_key": f"{i:05d}"} for i, row in enumerate(document_rows())]
    write_table(tmp_path / "documents", rows)
    plan = run(plan_job(failing_spec(tmp_path, planner={"part_rows": 3}), DS))
    found = find_failed_rows(plan.folder.uri, 7)
    assert [row.key["row_key"] for row in found.rows] == [f"{i:05d}" for i in range(7)]
    assert found.num_failed_rows == 30
    assert find_failed_rows(plan.folder.uri, 0).rows == ()


def test_the_command_lists_counts_and_limits(tmp_path: Path, batchllm: Batchllm) -> None:
    rows = faulty_rows()
    rows[0]["row_key"] = "a\x1b[2J\nb"
    write_table(tmp_path / "documents", rows)
    file, result = tmp_path / "job.yaml", tmp_path / "result.json"
    file.write_text(yaml.safe_dump(job_fields(str(tmp_path), engine=FAULTY)))
    of_job = ("--job", str(file), "--ds", DS)
    assert batchllm("failed", *of_job).code == ExitCode.INVALID
    plan = run(plan_job(failing_spec(tmp_path), DS))
    outcome = batchllm("failed", *of_job, "--limit", "1", "--result", str(result))
    assert outcome.out.splitlines() == [
        f"job job, partition {DS}: 2 of 12 rows failed; not published",
        "  by kind: 1 engine_error, 1 null_value",
        "  row_key=a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b: engine_error: error"
        " token in the prompt",
        "  1 more; --limit 2 lists all",
    ]
    written = json.loads(result.read_text())
    assert written["errors_by_kind"] == {"engine_error": 1, "null_value": 1}
    assert written["rows"][0]["key"] == {"row_key": "a\x1b[2J\nb"}
    assert batchllm("failed", "--plan", plan.folder.uri).out.count("null_value") == 2
    assert batchllm("failed", "--plan", plan.folder.uri, "--limit", "-1").code == ExitCode.INVALID


def test_a_refused_commit_notes_its_reason_and_the_kinds(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert Refusal.read(plan.folder, REFUSED_FILE, plan_id=plan.manifest.plan_id) is None
    with pytest.raises(IncompleteRunError):
        commit_run(plan.folder.uri)
    noted = Refusal.read(plan.folder, REFUSED_FILE, plan_id=plan.manifest.plan_id)
    assert noted is not None and "unfinished: shard 0" in noted.reason and noted.errors == ()
    run(plan)
    with pytest.raises(FailedRowsError) as caught:
        commit_run(plan.folder.uri)
    noted = Refusal.read(plan.folder, REFUSED_FILE, plan_id=plan.manifest.plan_id)
    assert noted is not None
    assert (noted.reason, noted.num_failed_rows) == (str(caught.value), 2)
    assert noted.errors[1] == ErrorKind(
        kind="null_value",
        num_rows=1,
        example_keys=({"row_key": "d1-q0"},),
        example_error="null_value: column 'document' is null",
    )
    plan.folder.write_bytes(REFUSED_FILE, b"{}")
    with pytest.raises(PlanError, match="no refused_version"):
        Refusal.read(plan.folder, REFUSED_FILE, plan_id=plan.manifest.plan_id)


def test_a_refusal_that_cannot_be_noted_stays_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = run(planned(tmp_path))
    write = Folder.write_bytes

    def fail(folder: Folder, name: str, data: bytes) -> None:
        if name == REFUSED_FILE:
            raise StorageError("full")
        write(folder, name, data)

    monkeypatch.setattr(Folder, "write_bytes", fail)
    with pytest.raises(FailedRowsError):
        commit_run(plan.folder.uri)
    assert "refused.json isn't written: full" in caplog.text
