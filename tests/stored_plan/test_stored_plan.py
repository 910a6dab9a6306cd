"""A plan in the lake: found, checked, filed where its job and partition say."""

from pathlib import Path

import pytest
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.errors import PlanError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.stored_plan.stored_plan import StoredPlan, job_folder


@pytest.fixture
def plan(tmp_path: Path) -> StoredPlan:
    write_table(tmp_path / "documents", document_rows(2, 2))
    return plan_job(fake_spec(tmp_path), DS)


@pytest.mark.parametrize("ds", ["2026-01-31", "a/b", "..", ".", "a b", "ü", "%2F", "_x"])
def test_each_partition_has_a_folder_of_its_own_below_the_job(tmp_path: Path, ds: str) -> None:
    folder = Path(job_folder(fake_spec(tmp_path), ds).path)
    assert folder.parent == tmp_path / "out" / "_batchllm" / "job"
    assert folder.resolve() == folder


def test_a_folder_without_a_manifest_is_no_plan(tmp_path: Path) -> None:
    for uri in (tmp_path, tmp_path / "absent"):
        with pytest.raises(PlanError, match=r"there is no manifest\.json"):
            StoredPlan.open(str(uri))


def test_a_superseded_plan_is_not_current_until_it_is_planned_again(
    plan: StoredPlan, tmp_path: Path
) -> None:
    plan.check_current()
    StoredPlan.mark_superseded_at(plan.folder, by="another")
    with pytest.raises(PlanError, match="a later plan's outputs"):
        plan.check_current()
    assert plan_job(fake_spec(tmp_path), DS).folder == plan.folder
    plan.check_current()
