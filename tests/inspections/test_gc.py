"""What `gc` removes, what it never touches, and what a cleared task does after it."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Batchllm
from support.fake_job import DS, document_rows, fake_spec, write_job, write_table
from support.shard_progress import leave_progress
from support.staged_job import Engines, check_published, claim_attempt, plan_one_shard, put_table

from batchllm_operator.commands.tools import parse_age
from batchllm_operator.commit import commit_run as commit_module
from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.partition import write_partition
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import PlanError, StorageError
from batchllm_operator.inspect import gc as gc_module
from batchllm_operator.inspect.gc import Garbage, Kept, find_garbage, remove_garbage
from batchllm_operator.inspect.verify import record_plan, verify_worker
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run import shard_queue as queue_module
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import Attempt, claim_number
from batchllm_operator.shards.reports import COMMITTED_FILE
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan, job_root

DAY_S = 86_400.0
KEPT = ["committed.json", "manifest.json", "report.html", "report.json", "turn.json"]


def collect(spec: JobSpec, *, age_s: float = -DAY_S) -> tuple[list[Garbage], list[Kept]]:
    """Find and remove what is older than `age_s`; by default all that may ever go."""
    garbage, kept = find_garbage(spec, before=time.time() - age_s)
    removed, changed = remove_garbage(garbage)
    return removed, kept + changed


def run_and_commit(plan: StoredPlan) -> StoredPlan:
    run_worker(plan, owner="task")
    commit_run(plan.folder.uri)
    return plan


def make_old(folder: Path | str, *, days: float = 30) -> None:
    """Set the time of all files below, as if nothing had happened since."""
    then = time.time() - days * DAY_S
    for path in Path(folder).rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    return plan_one_shard(lake_uri)


@pytest.fixture
def local_plan(tmp_path: Path) -> StoredPlan:
    return plan_one_shard(str(tmp_path))


# Plans that are published


def test_of_a_published_plan_the_parts_and_shards_go(plan: StoredPlan) -> None:
    run_and_commit(plan)
    spec, report = plan.manifest.spec, load_report(plan.folder.uri)
    [removed], kept = collect(spec)
    assert kept == []
    assert removed.what == "is published: parts and shards"
    assert list(plan.folder.find()) == KEPT
    check_published(plan)
    assert load_report(plan.folder.uri) == report
    assert collect(spec) == ([], []), "there is nothing left to find"


def test_a_cleared_task_of_a_collected_plan_pays_nothing(plan: StoredPlan) -> None:
    run_and_commit(plan)
    report = load_report(plan.folder.uri)
    collect(plan.manifest.spec)
    verified = verify_worker(plan.folder.uri)
    assert verified.num_finished == 1
    engines = Engines()
    assert run_worker(plan, start=engines) == verified
    assert commit_run(plan.folder.uri) == report
    # The whole DAG run is cleared: the plan is made again, and is the same.
    assert plan_job(plan.manifest.spec, DS).folder == plan.folder
    assert run_worker(plan, start=engines) == verified
    assert commit_run(plan.folder.uri) == report
    assert engines.started == []


def test_without_its_rows_a_collected_plan_is_made_again(local_plan: StoredPlan) -> None:
    """Somebody has dropped the partition, to have it made anew."""
    plan, spec = run_and_commit(local_plan), local_plan.manifest.spec
    collect(spec)
    shutil.rmtree(Path(spec.output.uri) / f"ds={DS}")
    with pytest.raises(PlanError, match=r"shard-00000\.parquet is missing; make the plan again"):
        run_worker(plan)
    run_and_commit(plan_job(spec, DS))
    check_published(plan)


def test_a_published_plan_whose_note_cannot_be_read_stays(local_plan: StoredPlan) -> None:
    plan = run_and_commit(local_plan)
    plan.folder.write_bytes(COMMITTED_FILE, b"{}")
    garbage, [kept] = find_garbage(plan.manifest.spec, before=time.time() + DAY_S)
    assert garbage == []
    assert kept.why == "it is published, without a committed.json: commit it once more"
    commit_run(plan.folder.uri)
    [removed], _ = collect(plan.manifest.spec)
    assert removed.folder == plan.folder


def test_a_later_plan_still_learns_from_a_collected_one(tmp_path: Path) -> None:
    spec = fake_spec(tmp_path, planner={"estimated_output_tokens": {"learned": True}})
    rows = document_rows(6, 30)
    for row in rows:
        row["document"] *= 8
    put_table(str(tmp_path), rows)
    first = run_and_commit(plan_job(spec, DS))
    collect(spec)
    assert [n for n in first.folder.find() if n.endswith(".parquet")] == ["lengths.parquet"]
    put_table(str(tmp_path), rows, "2026-02-01")
    learned = plan_job(spec, "2026-02-01").manifest.learned
    assert learned is not None
    assert (learned.ds, learned.num_known_prefixes > 0) == (DS, True)


# Plans that are not, or no more


def test_a_replaced_plan_goes_and_the_one_that_replaced_it_stays(plan: StoredPlan) -> None:
    run_and_commit(plan)
    spec = plan.manifest.spec
    changed = fake_spec(spec.input.uri.removesuffix("/documents"), sampling={"max_tokens": 9})
    second = run_and_commit(plan_job(changed, DS))
    whats = {garbage.folder.uri: garbage.what for garbage in collect(spec)[0]}
    assert whats == {
        plan.folder.uri: "another plan has taken its place",
        second.folder.uri: "is published: parts and shards",
    }
    assert not plan.folder.exists()
    assert list(second.folder.find()) == KEPT
    with pytest.raises(PlanError, match=r"there is no manifest\.json"):
        commit_run(plan.folder.uri)  # a retry of a task long past
    check_published(second)


def test_a_replaced_plan_grows_old_whatever_is_committed_later(tmp_path: Path) -> None:
    plans = []
    for number in range(3):
        put_table(str(tmp_path), document_rows(2, 2 + number))
        plans.append(run_and_commit(plan_job(fake_spec(tmp_path), DS)))
        if number == 1:
            make_old(plans[0].folder.path)
    removed, _ = collect(plans[0].manifest.spec, age_s=DAY_S)
    assert [each.folder for each in removed] == [plans[0].folder]


def test_a_plan_that_was_to_be_replaced_but_was_not_is_published(plan: StoredPlan) -> None:
    """A commit notes in the older plan's folder that it replaces it, and may then be killed."""
    run_and_commit(plan)
    StoredPlan.mark_superseded_at(plan.folder, by="another")
    [removed], _ = collect(plan.manifest.spec)
    assert removed.what == "is published: parts and shards"
    assert verify_worker(plan.folder.uri).num_finished == 1


def test_a_plan_without_a_commit_goes_when_it_is_old(plan: StoredPlan) -> None:
    run_worker(plan)
    spec = plan.manifest.spec
    assert collect(spec, age_s=DAY_S) == ([], [])
    [removed], _ = collect(spec)
    assert removed.what == "was never published"
    assert not plan.folder.exists()
    run_and_commit(plan_job(spec, DS))
    check_published(plan)


def test_a_plan_of_another_output_table_is_asked_about_there(tmp_path: Path) -> None:
    """Two specs of one job may have one folder for their plans."""
    staging = {"staging_uri": str(tmp_path / "staging")}
    put_table(str(tmp_path), document_rows())
    spec = fake_spec(tmp_path, output=staging)
    plan = run_and_commit(plan_job(spec, DS))
    moved = fake_spec(tmp_path, output={"uri": str(tmp_path / "elsewhere"), **staging})
    [removed], _ = collect(moved)
    assert removed.what == "is published: parts and shards"
    assert list(plan.folder.find()) == KEPT


def test_a_folder_without_a_manifest_goes(plan: StoredPlan) -> None:
    plan.folder.remove("manifest.json")
    [removed], _ = collect(plan.manifest.spec)
    assert removed.what == "was never completed"
    assert not plan.folder.exists()


def test_a_published_plan_without_its_manifest_stays(plan: StoredPlan) -> None:
    run_and_commit(plan)
    plan.folder.remove("manifest.json")
    before = list(plan.folder.find())
    [], [kept] = collect(plan.manifest.spec)
    assert "it is published" in kept.why
    assert list(plan.folder.find()) == before


def test_what_cannot_be_told_stays(local_plan: StoredPlan) -> None:
    spec, lake = local_plan.manifest.spec, Path(local_plan.manifest.spec.output.uri)
    manifest = local_plan.folder.read_bytes("manifest.json")
    fields = json.loads(manifest) | {"plan_version": 2}
    local_plan.folder.write_bytes("manifest.json", json.dumps(fields).encode())
    [], [kept] = collect(spec)
    assert "this release reads 1" in kept.why
    local_plan.folder.write_bytes("manifest.json", manifest)
    (lake / f"ds={DS}").mkdir()
    pq.write_table(pa.table({"precious": [1]}), lake / f"ds={DS}" / "theirs.parquet")
    [], [kept] = collect(spec)
    assert "theirs.parquet" in kept.why
    assert StoredPlan.open(local_plan.folder.uri).manifest == local_plan.manifest


# What is still worked on


def test_a_run_in_progress_keeps_its_plan(local_plan: StoredPlan) -> None:
    """However old the plan: what a run writes is young, its claim first of all."""
    spec, path = local_plan.manifest.spec, Path(local_plan.folder.path)
    found: list[list[Garbage]] = []

    def look() -> None:
        found.append(collect(spec, age_s=DAY_S)[0])

    make_old(path)
    run_worker(local_plan, start=Engines(at=0, act=look))
    assert found == [[]]
    make_old(path)
    (path / "runs" / "shard-00000" / "report.json").unlink()
    claim_attempt(local_plan.run_folder(0))
    assert collect(spec, age_s=DAY_S) == ([], [])
    make_old(path)
    leave_progress(local_plan, 0)
    assert collect(spec, age_s=DAY_S) == ([], [])
    make_old(path)
    plan_job(spec, DS)  # its files are written anew
    assert collect(spec, age_s=DAY_S) == ([], [])
    make_old(path)
    [removed], _ = collect(spec, age_s=DAY_S)
    assert removed.folder == local_plan.folder


def test_a_commit_in_progress_keeps_its_plan(
    local_plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old the parts, and however long ago it began when it comes to publish."""
    plan, spec = local_plan, local_plan.manifest.spec
    run_worker(plan)
    make_old(Path(plan.folder.path))
    found: list[list[Garbage]] = []

    def gather(*args: Any) -> Path:
        found.append(collect(spec, age_s=DAY_S)[0])
        data = write_partition(*args)
        make_old(Path(plan.folder.path))
        return data

    def publish(*args: Any) -> None:
        found.append(collect(spec, age_s=DAY_S)[0])
        original(*args)

    original = commit_module._publish
    monkeypatch.setattr(commit_module, "write_partition", gather)
    monkeypatch.setattr(commit_module, "_publish", publish)
    commit_run(plan.folder.uri)
    assert found == [[], []]
    check_published(plan)


@pytest.mark.parametrize("work", ["run", "commit"])
def test_who_begins_just_then_keeps_the_plan_or_is_told(
    plan: StoredPlan, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work begins when the manifest has gone, before the look that follows."""
    spec, manifest = plan.manifest.spec, plan.folder.read_bytes("manifest.json")
    looks: list[int] = []
    original = gc_module.list_files

    def begin() -> None:
        if work == "run":
            claim_attempt(plan.run_folder(0), "task")
            plan.check_stays()
        else:
            plan.mark_committing()

    def look(folder: Folder) -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 2:
            with pytest.raises(PlanError, match="has just removed it"):
                begin()
        return original(folder)

    garbage, _ = find_garbage(spec, before=time.time() + DAY_S)
    monkeypatch.setattr(gc_module, "list_files", look)
    removed, [kept] = remove_garbage(garbage)
    assert removed == [] and kept.why == "work on it has begun again"
    assert plan.folder.read_bytes("manifest.json") == manifest
    run_and_commit(plan)
    check_published(plan)


def test_a_run_whose_plan_has_just_gone_pays_nothing(
    local_plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was collected after the run had looked at it, before the run made its claim."""

    def claim(*claimed: Any) -> Attempt | None:
        assert collect(local_plan.manifest.spec)[0]
        return claim_number(*claimed)

    monkeypatch.setattr(queue_module, "claim_number", claim)
    engines = Engines()
    with pytest.raises(PlanError, match="has just removed it; make the plan again"):
        run_worker(local_plan, start=engines)
    assert engines.started == []


def test_a_folder_of_another_name_stays(local_plan: StoredPlan) -> None:
    folder = Path(job_root(local_plan.manifest.spec).path) / DS / "plan-b"
    folder.mkdir()
    (folder / "notes.txt").write_text("not ours")
    [removed], _ = collect(local_plan.manifest.spec)
    assert removed.folder == local_plan.folder
    assert (folder / "notes.txt").exists()


def test_what_changes_between_looking_and_removing_stays(plan: StoredPlan) -> None:
    garbage, _ = find_garbage(plan.manifest.spec, before=time.time() + DAY_S)
    assert [each.folder for each in garbage] == [plan.folder]
    claim_attempt(plan.run_folder(0), "task")
    removed, [kept] = remove_garbage(garbage)
    assert removed == [] and kept.why == "it has changed meanwhile"
    run_and_commit(plan)


def test_a_plan_that_is_half_removed_is_none(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Folder.remove

    def remove(self: Folder, name: str) -> None:
        if name != "manifest.json":
            raise StorageError("the connection broke")
        original(self, name)

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "remove", remove)
        with pytest.raises(StorageError):
            collect(plan.manifest.spec)
    with pytest.raises(PlanError, match="not a plan, or one never completed"):
        StoredPlan.open(plan.folder.uri)
    [removed], _ = collect(plan.manifest.spec)
    assert removed.what == "was never completed"


# Records and temporary files


def test_records_and_temporary_files_go_one_by_one(local_plan: StoredPlan) -> None:
    plan = run_and_commit(local_plan)
    spec = plan.manifest.spec
    jobs, table = Path(job_root(spec).path), Path(spec.output.uri)
    for name in ("old", "young"):
        record_plan(spec, DS, name, {"plan_uri": plan.folder.uri})
    temporary = ".data.parquet.0123456789abcdef0123456789abcdef.tmp"
    old = [
        jobs / DS / "records" / "old.json",
        Path(plan.folder.path) / ".manifest.json.0123456789abcdef0123456789abcdef.tmp",
        table / f"ds={DS}" / temporary,
    ]
    others = [
        table / f"ds={DS}" / ".data.parquet.another.tmp",
        table / "elsewhere" / temporary,
    ]
    for path in [*old, *others]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    young = table / f"ds={DS}" / ".data.parquet.ffffffffffffffffffffffffffffffff.tmp"
    young.write_bytes(b"a commit is writing it")
    collect(spec, age_s=DAY_S)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in [*others, young, jobs / DS / "records" / "young.json"])
    check_published(plan)
    assert verify_worker(plan.folder.uri).num_finished == 1


# The command


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A spec; of two partitions one is committed, all a month ago."""
    path = write_job(tmp_path, tmp_path, planner={"num_shards": 1})
    spec = fake_spec(tmp_path, planner={"num_shards": 1})
    for ds in (DS, "2026-02-01"):
        write_table(tmp_path / "documents", document_rows(2, 3), ds=ds)
        plan = plan_job(spec, ds)
    run_and_commit(plan)
    make_old(tmp_path / "out")
    return path


def test_the_command_lists_and_removes_when_told_to(
    job: Path, batchllm: Batchllm, tmp_path: Path
) -> None:
    def gc(*more: str) -> tuple[str, dict[str, Any]]:
        outcome = batchllm("gc", "--job", job, "--result", tmp_path / "gc.json", *more)
        assert outcome.code == 0, outcome.err
        return outcome.out, json.loads((tmp_path / "gc.json").read_text())

    before = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    listed, result = gc()
    assert listed.count("would remove") == 2 and "add --yes" in listed
    assert "(was never published)" in listed and "(is published: parts and shards)" in listed
    assert "30.0 days old" in listed
    make_old(tmp_path / "out", days=0.5)
    assert "12 h 00 min old" in gc("--older-than", "1h")[0]
    make_old(tmp_path / "out")
    assert result["command"] == "gc" and result["is_removed"] is False
    assert sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()) == before
    nothing, none = gc("--older-than", "31d")
    assert none["num_files"] == 0 and nothing.endswith("old enough and no longer needed\n")
    of_one = gc("--ds", DS, "--yes")[1]
    assert (of_one["num_folders"], of_one["is_removed"]) == (1, True)
    removed, rest = gc("--yes")
    assert removed.count("removed ") == 1 and "would" not in removed
    assert of_one["num_files"] + rest["num_files"] == result["num_files"]
    assert of_one["num_bytes"] + rest["num_bytes"] == result["num_bytes"]
    assert gc("--older-than", "0s", "--yes")[1]["num_files"] == 0
    assert pq.ParquetFile(tmp_path / "out" / "ds=2026-02-01" / "data.parquet").read().num_rows == 6


def test_without_times_nothing_is_taken_for_old(
    job: Path, batchllm: Batchllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some stores leave LastModified out of their listings, as local disks do."""
    before = sorted((tmp_path / "out").rglob("*"))
    monkeypatch.setattr(Folder, "is_local", False)
    outcome = batchllm("gc", "--job", job, "--older-than", "0s", "--yes")
    assert outcome.code == 2
    assert f"{tmp_path}/out/_batchllm/job/" in outcome.err
    assert "doesn't say when a file was written" in outcome.err and "Traceback" not in outcome.err
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_ages(batchllm: Batchllm, job: Path) -> None:
    ages = [parse_age(text) for text in ("0s", "90m", "36h", "7d", "2w")]
    assert ages == [0, 5400, 129_600, 604_800, 1_209_600]
    for text in ("7", "d", "-1d", "1.5h", "7 d", ""):
        outcome = batchllm("gc", "--job", job, f"--older-than={text}")
        assert outcome.code == 2 and "isn't an age" in outcome.err
