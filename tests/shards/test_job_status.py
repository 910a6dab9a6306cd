"""How far a run is, read from what attempts have left: states, totals, what can't be read."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.fake_job import DS, document_rows, fake_spec
from support.shard_progress import leave_progress
from support.staged_job import put_table, run_only

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import attempt_name
from batchllm_operator.shards.job_status import read_attempts, read_status
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
NUM_SHARDS = 3


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    """Three shards of 10 requests each, on local disk and on S3."""
    put_table(lake_uri, document_rows())
    return plan_job(fake_spec(lake_uri, planner={"num_shards": NUM_SHARDS}), DS)


def leave(plan: StoredPlan, shard_idx: int, attempt: int = 1, **fields: Any) -> None:
    """Of an attempt that has done 4 rows of its shard, and was seen a second ago."""
    known: dict[str, Any] = {
        "host": f"host-{attempt}",
        "started_at": NOW - timedelta(seconds=100),
        "updated_at": NOW - timedelta(seconds=1),
        "elapsed_s": 99.0,
        "num_rows_done": 4,
        "num_logical_tokens": 400,
        "num_prompt_tokens": 300,
        "num_cached_tokens": 100,
        "computed_tokens_per_s": 50.0,
        "output_tokens_per_s": 5.0,
        "eta_s": 61.0,
    }
    leave_progress(plan, shard_idx, attempt, **(known | fields))


def test_shards_that_nobody_has_begun_wait(plan: StoredPlan) -> None:
    status = read_status(plan.folder.uri, now=NOW)
    assert [shard.state for shard in status.shards] == ["waiting"] * NUM_SHARDS
    assert (status.num_rows, status.done.num_rows, status.eta_s) == (30, 0, None)
    assert not status.is_finished and not status.is_committed
    assert read_attempts(plan) == {}


def test_the_latest_attempt_says_how_far_a_shard_is(plan: StoredPlan) -> None:
    leave(plan, 1, 1, state="stopped", num_rows_done=3, elapsed_s=10.0)
    leave(plan, 1, 2)
    shard = read_status(plan, now=NOW).shards[1]
    assert (shard.state, shard.done.num_rows, shard.host) == ("running", 4, "host-2")
    assert (shard.num_attempts, shard.gpu_s) == (2, 2 * (10.0 + 99.0))
    assert (shard.age_s, shard.eta_s, shard.done.saving_ratio) == (1.0, 60.0, 0.5)
    attempts = read_attempts(plan)
    assert [each.attempt for each in attempts[1].progress] == [1, 2] and attempts[1].is_complete


@pytest.mark.parametrize(
    ("state", "interval_s", "age_s", "seen"),
    [
        ("running", 5.0, 60.0, "running"),
        ("running", 5.0, 61.0, "silent"),
        ("starting", 5.0, 61.0, "silent"),
        ("running", 30.0, 299.0, "running"),
        ("running", 30.0, 301.0, "silent"),
        ("running", 5.0, -3600.0, "running"),  # another clock
        ("stopped", 5.0, 3600.0, "stopped"),
        ("failed", 5.0, 3600.0, "failed"),
    ],
)
def test_an_attempt_without_a_sign_for_long_is_silent(
    plan: StoredPlan, state: Any, interval_s: float, age_s: float, seen: str
) -> None:
    when = NOW - timedelta(seconds=age_s)
    leave(plan, 0, state=state, interval_s=interval_s, updated_at=when)
    shard = read_status(plan, now=NOW).shards[0]
    assert shard.state == seen
    assert (shard.output_tokens_per_s > 0) == (shard.computed_tokens_per_s > 0)
    assert (shard.output_tokens_per_s > 0) == (shard.eta_s is not None) == (seen in ("running"))


def test_all_shards_wait_for_the_latest_of_them(plan: StoredPlan) -> None:
    for shard_idx in range(NUM_SHARDS):
        num_left = plan.manifest.shards[shard_idx].num_rows - 4
        leave(plan, shard_idx, eta_s=1.0 + num_left * (shard_idx + 1), worker=11 - shard_idx)
    status = read_status(plan, now=NOW)
    assert [worker.worker for worker in status.workers] == [9, 10, 11]
    assert (status.computed_tokens_per_s, status.output_tokens_per_s) == (150.0, 15.0)
    assert status.eta_s == pytest.approx(max(shard.eta_s or 0 for shard in status.shards))


def test_a_worker_has_all_that_it_began(plan: StoredPlan) -> None:
    """It feeds its second shard, and its first has been taken over by another of its number."""
    old, new = {"worker": 4, "num_workers": 5, "host": "a"}, {"worker": 4, "num_workers": 9}
    long_ago = NOW - timedelta(seconds=300)
    leave(plan, 0, 1, **old, updated_at=long_ago, gpu_held_s=10.0)
    leave(plan, 0, 2, **new, host="b", state="finished", num_rows_done=10)
    leave(plan, 1, 1, **new, host="b", num_rows_done=7)
    leave(plan, 2, 1, **new, host="b", state="starting", gpu_held_s=0.0)
    status = read_status(plan, now=NOW)
    assert [shard.worker for shard in status.shards] == [4, 4, 4]
    assert status.num_live_workers == 1
    here, lost = status.workers
    assert (here.host, here.num_workers, here.state, here.live_shards) == (
        "b",
        9,
        "running",
        (1, 2),
    )
    done = (here.num_finished, here.num_rows_done, here.computed_tokens_per_s)
    assert done == (1, 10 + 7 + 4, 100.0)
    assert (here.gpu_s, here.age_s) == (2 * 99.0 + 2 * 99.0, 1.0)
    assert (lost.host, lost.num_workers, lost.state, lost.live_shards) == ("a", 5, "silent", ())
    assert (lost.num_finished, lost.num_rows_done, lost.computed_tokens_per_s) == (0, 0, 0.0)
    assert (lost.gpu_s, lost.age_s) == (20.0, 300.0)
    assert sum(worker.gpu_s for worker in status.workers) == status.gpu_s


@pytest.mark.parametrize(
    ("state", "seen"),
    [("finished", "idle"), ("stopped", "stopped"), ("failed", "failed"), ("starting", "starting")],
)
def test_the_state_of_a_worker_is_that_of_its_last_shard(
    plan: StoredPlan, state: Any, seen: str
) -> None:
    before = NOW - timedelta(seconds=30)
    leave(plan, 2, worker=0, host="a", state="finished", updated_at=before)
    leave(plan, 1, worker=0, host="a", state=state)
    [worker] = read_status(plan, now=NOW).workers
    assert worker.state == seen
    assert worker.is_live == (seen == "starting")


def test_rows_of_waiting_shards_go_at_the_speed_of_live_ones(plan: StoredPlan) -> None:
    num_left = plan.manifest.shards[0].num_rows - 4
    leave(plan, 0, eta_s=num_left * 2.0)  # half a row per second
    for later_s in (0.0, 7.0, num_left * 2.0 - 1.0):
        status = read_status(plan, now=NOW + timedelta(seconds=later_s))
        assert status.eta_s == pytest.approx((30 - 4) * 2.0 - 1.0 - later_s), "no leap"


def test_a_report_without_progress_is_of_a_finished_shard(plan: StoredPlan) -> None:
    report = run_worker(plan).shards[0]
    for path in plan.run_folder(0).find():
        if path.endswith("progress.json"):
            plan.run_folder(0).remove(path)
    shard = read_status(plan).shards[0]
    assert (shard.state, shard.done.num_rows) == ("finished", report.counts.num_rows)
    assert (shard.num_attempts, shard.age_s, shard.gpu_s) == (1, None, 0.0)
    assert not read_attempts(plan)[0].is_complete


def test_a_shard_that_is_repaired_is_live_again(plan: StoredPlan) -> None:
    run_worker(plan)
    leave(plan, 0, 2, updated_at=datetime.now(UTC))
    assert read_status(plan).shards[0].state == "running"


def test_an_attempt_killed_after_its_report_has_finished(plan: StoredPlan) -> None:
    run_only(plan, 0)
    leave(plan, 0, 1, worker=3)
    status = read_status(plan)
    assert (status.shards[0].state, status.shards[0].worker) == ("finished", 3)
    assert [(worker.state, worker.num_finished) for worker in status.workers] == [("silent", 1)]


def test_an_attempt_without_progress_gives_no_sign(plan: StoredPlan) -> None:
    plan.run_folder(0).child(attempt_name(1)).write_bytes("claim.json", b"{}")
    shard = read_status(plan).shards[0]
    assert (shard.state, shard.done.num_rows, shard.age_s) == ("silent", 0, None)


def test_a_committed_plan_is_finished_whatever_was_removed(plan: StoredPlan) -> None:
    run_worker(plan)
    assert not read_status(plan).is_committed
    commit_run(plan.folder.uri)
    leave(plan, 0, 2, updated_at=datetime.now(UTC))  # no worker waits for it any more
    assert read_status(plan).is_finished
    for path in plan.folder.child("runs").find():
        plan.folder.child("runs").remove(path)
    status = read_status(plan)
    assert status.is_committed and status.is_finished
    assert (status.done.num_rows, status.eta_s, status.notes) == (30, 0.0, ())


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"progress_version": 2}', b"[" * 9999]
)
def test_progress_that_cannot_be_read_is_noted(plan: StoredPlan, data: bytes) -> None:
    leave(plan, 0, 1, state="stopped")
    plan.run_folder(0).child(attempt_name(2)).write_bytes("progress.json", data)
    status = read_status(plan, now=NOW)
    assert status.shards[0].state == "stopped"
    assert len(status.notes) == 1 and "attempt-00002/progress.json" in status.notes[0]
    attempts = read_attempts(plan)[0]
    assert not attempts.is_complete and attempts.notes == status.notes


@pytest.mark.parametrize("changes", [{"plan_id": "f" * 16}, {"shard_idx": 1}, {"attempt": 7}])
def test_foreign_progress_is_noted(plan: StoredPlan, changes: dict[str, Any]) -> None:
    leave(plan, 0)
    folder = plan.run_folder(0).child(attempt_name(1))
    own = json.loads(folder.read_bytes("progress.json"))
    folder.write_bytes("progress.json", json.dumps(own | changes).encode())
    plan.run_folder(2).write_bytes("report.json", b"{}")
    status = read_status(plan, now=NOW)
    assert [shard.state for shard in status.shards] == ["silent", "waiting", "waiting"]
    assert "belongs elsewhere" in status.notes[0] and "no report_version" in status.notes[1]


def test_folders_of_no_shard_are_left_out(plan: StoredPlan) -> None:
    plan.folder.child("runs", "shard-00009", "attempt-00001").write_bytes("progress.json", b"")
    plan.folder.child("runs", "other").write_bytes("progress.json", b"")
    status = read_status(plan, now=NOW)
    assert len(status.shards) == NUM_SHARDS and not status.notes
