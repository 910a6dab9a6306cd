"""Attempts at one shard side by side: the later one fences the earlier, and no row counts twice."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from support.demo_job import wait_until
from support.fork_server import ForkServer
from support.staged_job import NUM_PARTS, NUM_ROWS, Engines, check_published, plan_one_shard

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import ExitCode, FencedError, IncompleteRunError, StorageError
from batchllm_operator.inspect.verify import verify_shard
from batchllm_operator.run import run_shards as run_module
from batchllm_operator.run.live_progress import INTERVAL_VARIABLE
from batchllm_operator.run.run_shards import run_shard
from batchllm_operator.run.shard_tally import ShardTally
from batchllm_operator.shards import attempts as attempts_module
from batchllm_operator.shards.attempts import (
    CLAIM_FILE,
    Attempt,
    attempt_name,
    check_free,
    claim_attempt,
)
from batchllm_operator.shards.parts import read_ledger
from batchllm_operator.shards.progress import PROGRESS_FILE, ShardProgress
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    return plan_one_shard(lake_uri)


def shard_files(plan: StoredPlan) -> dict[str, bytes]:
    folder = plan.run_folder(0)
    return {name: folder.read_bytes(name) for name in folder.find()}


def attempts_of_parts(plan: StoredPlan) -> list[int]:
    ledger = read_ledger(plan.run_folder(0), plan.manifest.plan_id)
    return [entry.attempt for entry in ledger.values()]


# Claims


def test_numbers_are_won_once(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("shard-00000")
    together = threading.Barrier(8)

    def claim(_: int) -> list[int]:
        together.wait()
        return [claim_attempt(folder).number for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        numbers = [number for won in pool.map(claim, range(8)) for number in won]
    assert sorted(numbers) == list(range(1, 33))
    claims = [folder.read_bytes(name) for name in folder.find()]
    assert len(set(claims)) == 32


def test_a_claim_whose_answer_was_lost_is_ours(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(f"{s3_bucket}/shard-00000")
    original = folder.fs.pipe_file

    def put(path: str, data: bytes, **options: Any) -> None:
        original(path, data, **options)
        raise ReadTimeoutError(endpoint_url="s3")

    monkeypatch.setattr(folder.fs, "pipe_file", put)
    attempt = claim_attempt(folder)
    assert attempt.number == 1
    attempt.check_current()
    assert list(folder.find()) == ["attempt-00001/claim.json"]


def test_a_later_claim_fences_and_an_earlier_one_does_not(lake_uri: str) -> None:
    folder = Folder.open(lake_uri).child("shard-00000")
    first, second = claim_attempt(folder), claim_attempt(folder)
    second.check_current()
    reason = rf"attempt 2 \(process {os.getpid()} on .* has taken over from attempt 1"
    with pytest.raises(FencedError, match=reason):
        first.check_current()


@pytest.mark.parametrize("rubbish", [b"", b"{}", b"\xff", b'{"claim_version": 9}', b"[" * 100_000])
def test_a_claim_that_cannot_be_read_is_a_claim(tmp_path: Path, rubbish: bytes) -> None:
    folder = Folder.open(str(tmp_path))
    first = claim_attempt(folder)
    folder.write_bytes(f"attempt-00007/{CLAIM_FILE}", rubbish)
    with pytest.raises(FencedError, match=r"attempt 7 \(its claim can't be read\)"):
        first.check_current()
    assert claim_attempt(folder).number == 8


def test_what_is_no_claim_fences_no_attempt(tmp_path: Path) -> None:
    """A process may be killed after it has made the folder, before it has made the claim."""
    folder = Folder.open(str(tmp_path))
    first = claim_attempt(folder)
    (tmp_path / "attempt-00002").mkdir()
    (tmp_path / "attempt-99").mkdir()
    (tmp_path / "attempt-00009x").mkdir()
    (tmp_path / "attempt-00008").write_bytes(b"a file")
    first.check_current()
    assert claim_attempt(folder).number == 3


# Side by side


@pytest.mark.parametrize("at", [0, 4, 7, 29])
def test_a_zombie_stops_when_another_has_taken_over(plan: StoredPlan, at: int) -> None:
    """Attempt 2 does all of its work while attempt 1 is about to answer request `at`."""
    successor = Engines()
    zombie = Engines(at, lambda: run_shard(plan.folder.uri, 0, start=successor))
    with pytest.raises(FencedError, match=r"attempt 2 .* taken over from attempt 1, which stops"):
        run_shard(plan.folder.uri, 0, start=zombie)
    num_kept = at // 5
    assert attempts_of_parts(plan) == [1] * num_kept + [2] * (NUM_PARTS - num_kept)
    assert successor.num_answers == NUM_ROWS - 5 * num_kept
    assert zombie.num_answers == 5 * (num_kept + 1), "at most one part that doesn't count"
    assert verify_shard(plan.folder.uri, 0).num_resumed_parts == num_kept
    assert commit_run(plan.folder.uri).num_rows_out == NUM_ROWS
    check_published(plan)


@pytest.mark.parametrize(
    ("owner", "successor", "takes_over"),
    [
        ("one", "other", False),
        (None, "other", False),
        ("one", "one", True),
        ("one", None, True),
        (None, None, True),
    ],
)
def test_a_live_attempt_of_another_task_is_left_alone(
    plan: StoredPlan, owner: str | None, successor: str | None, takes_over: bool
) -> None:
    """A next try of the same task, and a run by hand, take over at once."""
    engines = Engines()
    refused: list[FencedError] = []

    def succeed() -> None:
        try:
            if not takes_over:
                with pytest.raises(FencedError, match="is working for another run"):
                    verify_shard(plan.folder.uri, 0, owner=successor)
                with pytest.raises(IncompleteRunError):
                    verify_shard(plan.folder.uri, 0)
            run_shard(plan.folder.uri, 0, start=engines, owner=successor)
        except FencedError as error:
            refused.append(error)

    first = Engines(7, succeed)
    if takes_over:
        with pytest.raises(FencedError, match="has taken over from attempt 1"):
            run_shard(plan.folder.uri, 0, start=first, owner=owner)
        assert refused == [] and attempts_of_parts(plan) == [1] + [2] * (NUM_PARTS - 1)
    else:
        run_shard(plan.folder.uri, 0, start=first, owner=owner)
        (error,) = refused
        reason = rf"attempt 1 \(process {os.getpid()} on .* is working for another run, so this one"
        assert re.search(reason, str(error)) and engines.started == []
        assert plan.run_folder(0).subfolder_names() == ["attempt-00001"]
        assert attempts_of_parts(plan) == [1] * NUM_PARTS


@pytest.mark.parametrize("progress", ["none", "rubbish", "old", "stopped"])
def test_an_attempt_of_another_task_that_gives_no_sign_is_taken_over(
    plan: StoredPlan, progress: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.1")
    folder = plan.run_folder(0)
    path = f"attempt-00001/{PROGRESS_FILE}"

    def die() -> None:
        raise KilledError(folder.read_bytes(path))

    with pytest.raises(KilledError) as killed:
        run_shard(plan.folder.uri, 0, start=Engines(7, die), owner="one")
    live = ShardProgress.from_bytes(killed.value.args[0], source=path)
    if progress == "none":
        folder.remove(path)
    elif progress == "rubbish":
        folder.write_bytes(path, b"{")
    else:
        hour_ago = live.updated_at - timedelta(hours=1)
        changes = {"updated_at": hour_ago} if progress == "old" else {"state": "stopped"}
        folder.write_bytes(path, live.model_copy(update=changes).model_dump_json().encode())
    with pytest.raises(IncompleteRunError):
        verify_shard(plan.folder.uri, 0, owner="other")
    report = run_shard(plan.folder.uri, 0, owner="other")
    assert attempts_of_parts(plan) == [1] + [2] * (NUM_PARTS - 1)
    assert report.num_resumed_parts == 1


@pytest.mark.parametrize("clock_s", [-7200, -90, -30, 30, 90, 7200])
@pytest.mark.parametrize("interval_s", [5.0, 3600.0])
@pytest.mark.parametrize("lives", [True, False])
def test_an_attempt_lives_by_its_signs_and_not_by_its_clock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock_s: float,
    interval_s: float,
    lives: bool,
) -> None:
    """A young sign is one; of an old one, or one from the future, another look says more."""
    folder = Folder.open(str(tmp_path))
    path = f"{attempt_name(claim_attempt(folder, 'one').number)}/{PROGRESS_FILE}"
    start = datetime.now(UTC) + timedelta(seconds=clock_s)
    slept: list[float] = []

    def write() -> None:
        progress = ShardProgress(
            plan_id="p",
            shard_idx=0,
            attempt=1,
            host="h",
            state="running",
            started_at=start,
            updated_at=start + timedelta(seconds=sum(slept)),
            interval_s=interval_s,
            elapsed_s=sum(slept),
            num_rows=2,
            num_rows_done=1,
            num_parts=2,
            num_parts_done=1,
        )
        folder.write_bytes(path, progress.model_dump_json().encode())

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if lives:
            write()

    monkeypatch.setattr(attempts_module.time, "sleep", sleep)
    write()
    is_young = abs(clock_s) < (60 if interval_s < 60 else 600)
    with pytest.raises(FencedError) if lives or is_young else nullcontext():
        check_free(folder, "other")
    assert slept == ([] if is_young else [15.0 if interval_s < 60 else 180.0])


class KilledError(Exception):
    """Has what the attempt's progress object was."""


def test_an_entry_that_comes_late_is_a_part_like_any_other(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 2 does all of its work between the look of attempt 1 and its entry."""
    original = Attempt.check_current
    looked: list[int] = []

    def check(self: Attempt) -> None:
        original(self)
        if not looked:
            looked.append(self.number)
            run_shard(plan.folder.uri, 0)

    monkeypatch.setattr(Attempt, "check_current", check)
    with pytest.raises(FencedError):
        run_shard(plan.folder.uri, 0, start=Engines())
    assert plan.run_folder(0).exists("attempt-00001/part-00000.json")
    assert attempts_of_parts(plan) == [2] * NUM_PARTS
    commit_run(plan.folder.uri)
    check_published(plan)


def test_what_was_finished_before_the_claim_is_not_generated_again(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is read again once the claim is made: attempt 1 went on until then."""
    original = run_module.claim_attempt

    def claim(folder: Folder, owner: str | None) -> Attempt:
        monkeypatch.setattr(run_module, "claim_attempt", original)
        run_shard(plan.folder.uri, 0)
        return claim_attempt(folder, owner)

    monkeypatch.setattr(run_module, "claim_attempt", claim)
    engines = Engines()
    report = run_shard(plan.folder.uri, 0, start=engines)
    assert engines.started == []
    assert report.num_resumed_parts == NUM_PARTS
    assert set(attempts_of_parts(plan)) == {1}


def test_a_report_is_that_of_the_latest_attempt(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plan.run_folder(0)
    count_part = ShardTally.count_part

    def claim_after_the_last(tally: ShardTally) -> None:
        count_part(tally)
        if tally.snapshot().num_parts_done == NUM_PARTS:
            claim_attempt(folder)

    with monkeypatch.context() as patch:
        patch.setattr(ShardTally, "count_part", claim_after_the_last)
        with pytest.raises(FencedError):
            run_shard(plan.folder.uri, 0)
    assert not folder.exists("report.json")
    report = run_shard(plan.folder.uri, 0)
    assert report.num_resumed_parts == NUM_PARTS
    assert verify_shard(plan.folder.uri, 0) == report


def test_a_finished_shard_is_not_claimed(plan: StoredPlan) -> None:
    run_shard(plan.folder.uri, 0)
    before = shard_files(plan)
    run_shard(plan.folder.uri, 0)
    after = shard_files(plan)
    assert list(after) == list(before)
    assert {n for n in after if after[n] != before[n]} == {"report.json"}


def test_processes_side_by_side(
    plan_of_slow_requests: StoredPlan, commands: ForkServer, tmp_path: Path
) -> None:
    """A pod that was cut off, as SIGSTOP does it, comes back when another has done its work."""
    plan = plan_of_slow_requests
    command = "batchllm_operator", ["run", "--shard", "0", "--plan", plan.folder.uri]
    with (tmp_path / "stderr").open("w") as stderr:
        zombie = commands.start(*command, stderr=stderr.fileno())
        wait_until(lambda: attempts_of_parts(plan), "the first part is finished")
        zombie.send_signal(signal.SIGSTOP)
        num_kept = len(attempts_of_parts(plan))
        assert commands.run(*command).returncode == 0
        commit_run(plan.folder.uri)
        zombie.send_signal(signal.SIGCONT)
        code = zombie.wait(timeout=60)
    said = (tmp_path / "stderr").read_text()
    assert code == ExitCode.FENCED
    assert "batchllm: error: " in said and "has taken over from attempt 1" in said
    assert num_kept < NUM_PARTS
    assert attempts_of_parts(plan) == [1] * num_kept + [2] * (NUM_PARTS - num_kept)
    check_published(plan)


@pytest.fixture
def plan_of_slow_requests(lake_uri: str) -> StoredPlan:
    return plan_one_shard(lake_uri, engine={"extra_args": {"delay_s": 0.05, "max_in_flight": 1}})


# Killed, damaged


KILLED_BEFORE_AN_ENTRY = """
import os, signal, sys
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.run.shard_tally import ShardTally
from batchllm_operator.run.run_shards import run_shard

looks = []
def check(self):
    looks.append(self)
    if len(looks) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Attempt.check_current = check
run_shard(sys.argv[1], 0)
"""


def test_killed_between_a_parts_file_and_its_entry(plan: StoredPlan) -> None:
    command = [sys.executable, "-P", "-c", KILLED_BEFORE_AN_ENTRY, plan.folder.uri]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    before = shard_files(plan)
    [orphan] = [name for name in before if "part-00002-" in name]
    assert attempts_of_parts(plan) == [1, 1]
    engines = Engines()
    run_shard(plan.folder.uri, 0, start=engines)
    assert engines.num_answers == NUM_ROWS - 10
    after = shard_files(plan)
    assert {name: after[name] for name in before} == before, "it stays for who looks into it"
    assert orphan in after
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_damaged_part_is_made_again_beside_the_old_one(plan: StoredPlan) -> None:
    run_shard(plan.folder.uri, 0)
    folder = plan.run_folder(0)
    damaged = read_ledger(folder, plan.manifest.plan_id)[3]
    folder.write_bytes(damaged.path, folder.read_bytes(damaged.path)[:-7])
    before = shard_files(plan)
    engines = Engines()
    run_shard(plan.folder.uri, 0, start=engines)
    assert engines.num_answers == 5
    after = shard_files(plan)
    assert {n: after[n] for n in before if n != "report.json"} == {
        n: data for n, data in before.items() if n != "report.json"
    }
    assert attempts_of_parts(plan) == [1, 1, 1, 2, 1, 1]
    commit_run(plan.folder.uri)
    check_published(plan)


def test_files_and_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file the content, then its name; of each new folder its name, too."""
    monkeypatch.setenv(INTERVAL_VARIABLE, "off")  # another thread's files come in between
    plan = plan_one_shard(str(tmp_path))
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    synced: list[Path] = []
    named: list[tuple[Path, int]] = []
    fsync, link, rename = os.fsync, Path.hardlink_to, Path.replace

    def noted_fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def noted_link(self: Path, target: Path) -> None:
        assert synced[-1] == target
        named.append((self, len(synced)))
        link(self, target)

    def noted_rename(self: Path, target: Path) -> Path:
        assert synced[-1] == self
        named.append((target, len(synced)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "hardlink_to", noted_link)
    monkeypatch.setattr(Path, "replace", noted_rename)
    run_shard(plan.folder.uri, 0)
    commit_run(plan.folder.uri)
    assert len(named) > 2 * NUM_PARTS
    assert all(synced[place] == path.parent for path, place in named)
    new = {path for path in tmp_path.rglob("*") if path.is_dir()} - before
    assert len(new) >= 4 and {path.parent for path in new} <= set(synced)


def test_a_claim_that_does_not_fit_on_the_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links it is written in its place; half of it would look like another's."""
    original = Path.open

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode != "xb":
            return original(self, mode, *args, **options)
        original(self, mode).close()
        return original(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(StorageError, match="No space left"):
        claim_attempt(Folder.open(str(tmp_path)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ranges_of_the_ledger_are_all_requests_once(plan: StoredPlan) -> None:
    run_shard(plan.folder.uri, 0)
    covered: list[int] = []
    for entry in read_ledger(plan.run_folder(0), plan.manifest.plan_id).values():
        assert entry.first_request_idx is not None and entry.last_request_idx is not None
        requests = range(entry.first_request_idx, entry.last_request_idx + 1)
        assert len(requests) == entry.num_requests
        covered += requests
    assert covered == list(range(NUM_ROWS))


def test_parts_of_an_older_release_are_gone_on_from(plan: StoredPlan) -> None:
    """Its ledger lay in the shard's folder itself."""
    run_shard(plan.folder.uri, 0)
    folder = plan.run_folder(0)
    ledger = read_ledger(folder, plan.manifest.plan_id)
    for entry in list(ledger.values())[:4]:
        newer = {"attempt", "first_request_idx", "last_request_idx"}
        old = entry.model_copy(update={"entry_version": 1}).model_dump_json(exclude=newer)
        folder.write_bytes(entry.file, folder.read_bytes(entry.path))
        folder.write_bytes(f"part-{entry.part_idx:05d}.json", old.encode())
    for name in folder.child("attempt-00001").find():
        folder.remove(f"attempt-00001/{name}")
    engines = Engines()
    report = run_shard(plan.folder.uri, 0, start=engines)
    assert (engines.num_answers, report.num_resumed_parts) == (10, 4)
    assert [attempt > 0 for attempt in attempts_of_parts(plan)] == [False] * 4 + [True] * 2
    commit_run(plan.folder.uri)
    check_published(plan)
