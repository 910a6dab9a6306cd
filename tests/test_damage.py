"""The damage matrix: each stored file truncated, missing, or of another version.

A plan that isn't whole is refused by every stage. Work that isn't whole is neither published nor
trusted, and made again beside what is left of it; notes that aren't whole cost only what they say.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_job import DS
from support.staged_job import NUM_ROWS, Engines, check_published, plan_one_shard

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.stored_plan.stored_plan import StoredPlan

ROWS_OF_A_PART = 5


@pytest.fixture
def plan(tmp_path: Path) -> StoredPlan:
    return plan_one_shard(str(tmp_path))


@pytest.fixture
def finished(plan: StoredPlan) -> StoredPlan:
    run_worker(plan.folder.uri, 0, 1)
    return plan


def path_of(plan: StoredPlan, pattern: str) -> Path:
    [path] = Path(plan.folder.full_path("")).glob(pattern)
    return path


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            path.write_bytes(data[:50] + bytes([data[50] ^ 0x40]) + data[51:])
        case "other version" | "no version":
            fields = json.loads(data)
            [version] = fields.keys() & VERSIONS
            number = fields.pop(version)
            name = version if how == "other version" else "a flipped bit in its name"
            path.write_text(json.dumps({**fields, name: number + 8}))


VERSIONS = {"plan_version", "entry_version", "report_version", "committed_version"}
JSON_DAMAGES = ["truncated", "missing", "other version"]
ENTRY_DAMAGES = ["truncated", "missing", "no version"]
FILE_DAMAGES = ["truncated", "missing", "flipped"]


def files(plan: StoredPlan) -> dict[str, bytes]:
    """All files of the plan that nothing replaces, by name."""
    replaced = ("report.json", "progress.json", "refused.json", "committing.json")
    names = (name for name in plan.folder.find() if not name.endswith(replaced))
    return {name: plan.folder.read_bytes(name) for name in names}


STAGES: dict[str, Callable[[str], Any]] = {
    "run": lambda uri: run_worker(uri, 0, 1),
    "verify": lambda uri: verify_worker(uri, 0, 1),
    "commit": commit_run,
    "status": read_status,
    "failed": lambda uri: find_failed_rows(uri, 1),
    "report": load_report,
}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "isn't JSON; make the plan again"),
        ("missing", "never completed"),
        ("other version", "is of plan_version 9, this release reads 1"),
        ("flipped", "plan .*manifest.json: "),
    ],
)
def test_a_damaged_manifest_is_refused_by_every_stage(
    finished: StoredPlan, how: str, words: str
) -> None:
    damage(path_of(finished, "manifest.json"), how)
    before = files(finished)
    for stage in STAGES.values():
        with pytest.raises(PlanError, match=words) as caught:
            stage(finished.folder.uri)
        assert finished.folder.uri in str(caught.value) and "\n" not in str(caught.value)
    assert files(finished) == before


@pytest.mark.parametrize("how", FILE_DAMAGES)
@pytest.mark.parametrize(
    ("name", "stage"), [("shard-00000.parquet", "run"), ("rows.parquet", "commit")]
)
def test_a_damaged_data_file_is_refused_and_planning_again_repairs_it(
    plan: StoredPlan, name: str, stage: str, how: str
) -> None:
    whole = files(plan)
    if stage == "commit":
        run_worker(plan.folder.uri, 0, 1)
    damage(path_of(plan, name), how)
    reason = "is missing" if how == "missing" else "is corrupted"
    with pytest.raises(PlanError, match=rf"{name} {reason}.*make the plan again"):
        STAGES[stage](plan.folder.uri)
    assert plan_job(plan.manifest.spec, DS).folder == plan.folder
    assert {kept: files(plan)[kept] for kept in whole} == whole
    run_worker(plan.folder.uri, 0, 1)
    commit_run(plan.folder.uri)
    check_published(plan)


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        *(("runs/*/attempt-00001/part-00003-*.parquet", how) for how in FILE_DAMAGES),
        *(("runs/*/attempt-00001/part-00003.json", how) for how in ENTRY_DAMAGES),
    ],
)
def test_a_damaged_part_is_not_published_but_made_again(
    finished: StoredPlan, pattern: str, how: str
) -> None:
    damage(path_of(finished, pattern), how)
    before = files(finished)
    with pytest.raises(IncompleteRunError, match=r"shard 0 \(5 of 6 parts\)"):
        commit_run(finished.folder.uri)
    with pytest.raises(IncompleteRunError, match="no worker runs shard 0"):
        verify_worker(finished.folder.uri, 0, 1)
    engines = Engines()
    run_worker(finished.folder.uri, 0, 1, start=engines)
    assert engines.num_answers == ROWS_OF_A_PART
    after = files(finished)
    assert {name: after[name] for name in before} == before, "nothing is replaced"
    assert verify_worker(finished.folder.uri, 0, 1).num_finished == 1
    assert commit_run(finished.folder.uri).num_rows_out == NUM_ROWS
    check_published(finished)


def test_a_ledger_entry_of_another_version_is_refused_by_name(finished: StoredPlan) -> None:
    damage(path_of(finished, "runs/*/attempt-00001/part-00003.json"), "other version")
    before = files(finished)
    for stage in ("run", "verify", "commit", "failed"):
        with pytest.raises(
            PlanError, match=r"part-00003\.json: is of entry_version 9, this release"
        ):
            STAGES[stage](finished.folder.uri)
    assert files(finished) == before


@pytest.mark.parametrize("how", JSON_DAMAGES)
def test_damaged_notes_of_a_commit_do_not_count_until_the_next_one(
    finished: StoredPlan, how: str
) -> None:
    report = commit_run(finished.folder.uri)
    path, note = path_of(finished, "report.json"), path_of(finished, "committed.json")
    whole = note.read_bytes()
    damage(path, how)
    with pytest.raises(PlanError, match="commit"):
        load_report(finished.folder.uri)
    path.unlink(missing_ok=True)
    again = commit_run(finished.folder.uri)
    assert again == report.model_copy(update={"committed_at": again.committed_at})
    damage(note, how)
    assert not read_status(finished).is_committed
    commit_run(finished.folder.uri)
    assert note.read_bytes() == whole and read_status(finished).is_committed
    check_published(finished)
