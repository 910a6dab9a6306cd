"""`on_unmet: branch`: refused answers are on a branch of the Iceberg table until accepted."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import Batchllm
from support.answers_job import NEXT, asking, published
from support.fake_job import DS, document_rows, write_table
from support.lake_tables import IcebergLake, losing, wrapped

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import ExitCode, ExpectationError, StorageError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.reports import REFUSED_FILE
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

COPIES: dict[str, Any] = {"generated_text": {"duplicate": {"max": 0.1}}}
NUM_ROWS = 20


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergLake:
    return IcebergLake(str(tmp_path), tmp_path, monkeypatch, "answers")


def finished(lake: IcebergLake, folder: Path, ds: str = DS, **changes: Any) -> StoredPlan:
    """A plan whose answers are refused unless `changes` say else."""
    write_table(folder / "documents", document_rows(4, 5), ds)
    output = {"uri": lake.address, "staging_uri": lake.staging}
    fields = {"expect": COPIES, "on_unmet": "branch", **changes}
    form = {"type": "choice", "choices": ["a", "b"]}
    run_worker(plan := plan_job(asking(folder, response_format=form, output=output, **fields), ds))
    return plan


def refuse(plan: StoredPlan) -> str:
    """The branch of answers that aren't published."""
    branch = f"batchllm-{plan.manifest.plan_id}"
    with pytest.raises(ExpectationError, match=f"the answers are on the table's branch '{branch}'"):
        commit_run(plan)
    return branch


def on_branch(lake: IcebergLake, branch: str, ds: str = DS) -> int:
    found = lake.load().scan(f"ds = '{ds}'").use_ref(branch).to_arrow()
    assert set(found["generated_text"].to_pylist()) <= {"a", "b"}
    return int(found.num_rows)


def head(lake: IcebergLake, ref: str = "main") -> int:
    return int(lake.load().metadata.refs[ref].snapshot_id)


def test_refused_answers_are_on_a_branch_which_accepting_them_promotes(
    lake: IcebergLake, tmp_path: Path, batchllm: Batchllm
) -> None:
    before = finished(lake, tmp_path, on_unmet="fail", expect={})
    commit_run(before)
    main, rows = head(lake), published(before.manifest.spec)
    plan = finished(lake, tmp_path, prompt={"template": "{document}: {query}"})
    branch = refuse(plan)
    assert (head(lake), published(before.manifest.spec)) == (main, rows)
    assert on_branch(lake, branch) == NUM_ROWS
    assert branch in json.loads(plan.folder.read_bytes(REFUSED_FILE))["reason"]
    assert branch in batchllm("status", "--plan", plan.folder.uri).out
    made = head(lake, branch)
    assert refuse(plan) == branch
    assert head(lake, branch) == made
    assert batchllm("commit", "--plan", plan.folder.uri, "--accept").code == ExitCode.OK
    assert head(lake) == made
    assert list(lake.load().metadata.refs) == ["main"]
    assert {row["run_id"] for row in published(plan.manifest.spec)} == {plan.publication.run_id}
    report = commit_run(plan)
    assert [each.is_met for each in report.expectations] == [False]
    assert head(lake) == made


def test_a_table_without_snapshots_has_branches_too(lake: IcebergLake, tmp_path: Path) -> None:
    plan = finished(lake, tmp_path)
    branch = refuse(plan)
    assert on_branch(lake, branch) == NUM_ROWS
    assert lake.load().scan().to_arrow().num_rows == 0
    commit_run(plan, accept=True)
    assert len(published(plan.manifest.spec)) == NUM_ROWS


def test_answers_are_published_on_top_of_what_others_have_done_meanwhile(
    lake: IcebergLake, tmp_path: Path
) -> None:
    plan, other = finished(lake, tmp_path), finished(lake, tmp_path, NEXT)
    branch, other_branch = refuse(plan), refuse(other)
    columns = lake.load().scan(limit=0).to_arrow().schema
    lake.load().append(pa.Table.from_pylist([{"ds": "2025-12-31", "status": "ok"}], schema=columns))
    by_others = head(lake)
    commit_run(plan, accept=True)
    table = lake.load()
    assert table.current_snapshot().parent_snapshot_id == by_others
    assert sorted({*table.scan().to_arrow()["ds"].to_pylist()}) == ["2025-12-31", DS]
    assert sorted(table.metadata.refs) == sorted(["main", other_branch])
    assert branch not in table.metadata.refs
    commit_run(other, accept=True)
    assert list(lake.load().metadata.refs) == ["main"]
    assert lake.load().scan().to_arrow().num_rows == 2 * NUM_ROWS + 1


def test_a_branch_that_is_mended_is_published_as_it_is(lake: IcebergLake, tmp_path: Path) -> None:
    plan = finished(lake, tmp_path)
    branch = refuse(plan)
    lake.load().delete("generated_text = 'b'", branch=branch)
    commit_run(plan, accept=True)
    assert {row["generated_text"] for row in published(plan.manifest.spec)} == {"a"}
    assert list(lake.load().metadata.refs) == ["main"]


def test_what_replaces_refused_answers_drops_their_branch(
    lake: IcebergLake, tmp_path: Path
) -> None:
    refuse(finished(lake, tmp_path))
    refuse(mended := finished(lake, tmp_path, prompt={"template": "{query}, {document}"}))
    assert len(lake.load().metadata.refs) == 3
    spec = mended.manifest.spec.model_copy(update={"expect": {}, "on_unmet": "fail"})
    commit_run(plan_job(JobSpec.model_validate(spec.model_dump()), DS))
    assert list(lake.load().metadata.refs) == ["main"]


def test_a_commit_whose_answer_is_lost_is_found_by_the_next(
    lake: IcebergLake, tmp_path: Path
) -> None:
    plan = finished(lake, tmp_path)
    with wrapped(lake.commit, losing(lake.lost)), pytest.raises((ExpectationError, StorageError)):
        commit_run(plan)
    branch = refuse(plan)
    made = head(lake, branch)
    with wrapped(lake.commit, losing(lake.lost)), pytest.raises(StorageError, match="lost"):
        commit_run(plan, accept=True)
    commit_run(plan)
    assert head(lake) == made
    assert len(published(plan.manifest.spec)) == NUM_ROWS
