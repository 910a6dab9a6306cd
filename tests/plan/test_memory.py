"""Planning within a memory budget, and on a disk that fills up."""

import re
from pathlib import Path

import pytest
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.spilling import file_size_limit

from batchllm_operator.errors import SpecError, StorageError
from batchllm_operator.plan import memory
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.plan_job import plan_job


def test_a_budget_too_small_says_the_least_that_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows())
    with pytest.raises(SpecError, match=r"memory_budget_bytes: 1000000 is too little") as caught:
        plan_job(fake_spec(tmp_path, planner={"memory_budget_bytes": "1MB"}), DS)
    assert not (tmp_path / "out").exists()
    found = re.search(r"at least (\d+) \(", str(caught.value))
    assert found is not None
    # What libraries take changes from one moment to the next, so a bit more than said.
    enough = int(found.group(1)) + (64 << 20)
    plan_job(fake_spec(tmp_path, planner={"memory_budget_bytes": enough}), DS)


def test_what_is_needed_grows_with_the_rows(tmp_path: Path) -> None:
    budget = MemoryBudget(total_bytes=2 << 30, resident_bytes=400 << 20)
    budget.check(1_000_000)
    with pytest.raises(SpecError, match="100,000,000 prompts"):
        budget.check(100_000_000)
    assert budget.least_bytes(1001) - budget.least_bytes(1) == 1000 * memory.BYTES_PER_PROMPT


def test_a_filter_is_no_reason_to_refuse_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows it keeps is known only afterwards; then the budget has to be enough."""
    write_table(tmp_path / "documents", document_rows())
    some = fake_spec(
        tmp_path, input={"filter": [{"column": "query", "op": "==", "value": "question 0"}]}
    )
    monkeypatch.setattr(memory, "BYTES_PER_PROMPT", 100 << 20)  # of 2 GiB
    assert plan_job(some, DS).manifest.counts.num_rows == 6
    with pytest.raises(SpecError, match="30 prompts"):
        plan_job(fake_spec(tmp_path), DS)


@pytest.mark.parametrize("num_bytes", [0, 2000, 12_000])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    write_table(tmp_path / "documents", document_rows(20, 5))
    spool = tmp_path / "temporary"
    spool.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spool))
    spec = fake_spec(tmp_path)
    with file_size_limit(num_bytes), pytest.raises(StorageError, match=r"no room.*TMPDIR"):
        plan_job(spec, DS)
    assert list(spool.iterdir()) == []
    assert not (tmp_path / "out").exists()
    plan_job(spec, DS)
    assert list(spool.iterdir()) == []
