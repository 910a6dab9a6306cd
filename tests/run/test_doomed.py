"""Runs whose failed rows alone make commit refuse the plan: they stop, and keep what they have."""

from pathlib import Path
from typing import Any

import pytest
from support.answers_job import asking
from support.fake_job import DS, JobFolder, document_rows, write_table
from support.staged_job import Engines, run_only

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import EngineError, ExitCode, FailedRowsError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.stored_plan.stored_plan import StoredPlan

SCHEMA = {"type": "object", "properties": {"summary": {"type": "string"}}, "required": ["summary"]}
INVALID: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "engine": {
        "backend": "fake",
        "extra_args": {"byte_tokens": True, "invalid_every": 1, "max_in_flight": 1},
    },
}


def planned(folder: Path, num_shards: int = 1, **changes: Any) -> StoredPlan:
    """A plan of 40 rows whose answers are all invalid."""
    write_table(folder / "documents", document_rows(8, 5))
    planner = {"num_shards": num_shards, "part_rows": 500}
    return plan_job(asking(folder, **{**INVALID, "planner": planner, **changes}), DS)


@pytest.mark.parametrize("tries", [0, 2])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_run_stops_when_its_failures_alone_pass_the_limit(
    tmp_path: Path, tries: int, num_shards: int
) -> None:
    retried = {"retry_invalid": tries, "sampling": {"temperature": 1.0}} if tries else {}
    plan = planned(tmp_path, num_shards, max_failed_fraction=0.1, **retried)
    engines = Engines()
    with pytest.raises(FailedRowsError) as stopped:
        run_worker(plan.folder.uri, 0, 1, start=engines)
    assert engines.num_answers == 5 * (1 + tries)
    for part in (
        "5 of 40 rows failed, 12.5 % (5 invalid_output), more than max_failed_fraction 0.1 allows",
        "commit would publish nothing, so the run stops. First invalid_output: row_key d0-q0: ",
        "raise max_failed_fraction in the spec, plan again and run: finished rows are kept",
    ):
        assert part in str(stopped.value)
    assert stopped.value.__notes__ == ["5 of the plan's 40 rows are finished and kept"]
    (failed, *_) = read_status(plan).shards
    assert (failed.state, failed.done.num_failed_rows) == ("failed", 5)

    again = Engines()
    with pytest.raises(FailedRowsError, match=r"5 of 40 rows failed.* First invalid_output"):
        run_worker(plan.folder.uri, 0, 1, start=again)
    assert again.started == [], "the failures were stored"

    plan = planned(tmp_path, num_shards, max_failed_fraction=1.0, **retried)
    run_worker(plan.folder.uri, 0, 1, start=again)
    assert again.num_answers == 35 * (1 + tries)
    assert commit_run(plan.folder.uri).num_failed_rows == 40


def test_rows_that_planning_has_rejected_count(tmp_path: Path) -> None:
    rows = document_rows(8, 5)
    for row in rows[:4]:
        row["query"] = None
    write_table(tmp_path / "documents", rows)
    plan = plan_job(asking(tmp_path, **INVALID, max_failed_fraction=0.1), DS)
    engines = Engines()
    with pytest.raises(FailedRowsError, match=r"5 of 40 .* \(4 null_value, 1 invalid_output\)"):
        run_worker(plan.folder.uri, 0, 1, start=engines)
    assert engines.num_answers == 1


def test_other_workers_stop_at_their_next_claim(tmp_path: Path) -> None:
    plan = planned(tmp_path, 4, max_failed_fraction=0.3)
    others: list[Engines] = []

    def other_worker() -> None:
        """It sees ten failed rows of the first worker, and adds three."""
        others.append(Engines())
        with pytest.raises(
            FailedRowsError, match=r"13 of 40 .*3 invalid_output, 10 in other shards"
        ):
            run_worker(plan.folder.uri, 1, 2, start=others[-1])

    run_only(plan, 0)
    other_worker()
    assert others[-1].num_answers == 3
    others.append(Engines())
    with pytest.raises(FailedRowsError, match=r"13 of 40 .*10 invalid_output, 3 in other shards"):
        run_worker(plan.folder.uri, 0, 2, start=others[-1])
    assert others[-1].started == []


def test_a_machine_that_fails_dooms_no_plan(tmp_path: Path) -> None:
    """It may be at fault for all rows that it couldn't serve."""
    write_table(tmp_path / "documents", document_rows(4, 5))
    deadly = {"byte_tokens": True, "fatal_token_id": ord("."), "max_in_flight": 1}
    engine = {"backend": "fake", "extra_args": deadly}
    spec = asking(tmp_path, engine=engine, planner={"num_shards": 1, "part_rows": 500})
    plan = plan_job(spec, DS)
    with pytest.raises(EngineError, match="6 requests in a row"):
        run_worker(plan)
    assert read_status(plan).done.num_rows == 0


def test_the_commands_end_with_the_exit_code_of_a_refused_commit(
    tmp_path: Path, batchllm: Any
) -> None:
    rows = document_rows(4, 3)
    job = JobFolder(tmp_path)
    job.write_rows(DS, [{**rows[0], "query": None}, *rows[1:]])
    strict = job.write_spec("strict")
    for command in ("plan", "job"):
        done = batchllm(command, "--job", strict, "--ds", DS)
        assert done.code == ExitCode.REFUSED
        assert "1 of 12 rows failed, 8.3 % (1 null_value)" in done.err
        assert not (tmp_path / "strict").exists()
    form = {name: value for name, value in INVALID.items() if name != "engine"}
    engine = {"extra_args": INVALID["engine"]["extra_args"]}
    lax = job.write_spec("lax", max_failed_fraction=0.5, engine=engine, **form)
    assert batchllm("plan", "--job", lax, "--ds", DS).code == 0
    done = batchllm("run", "--job", lax, "--ds", DS, "--worker", 0, "--num-workers", 1)
    assert done.code == ExitCode.REFUSED
    assert "7 of 12 rows failed" in done.err
    assert "6 of the plan's 11 rows are finished and kept" in done.err
