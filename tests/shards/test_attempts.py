"""Attempts at one shard side by side: the later one fences the earlier, and no row counts twice."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.demo_job import wait_until
from support.fork_server import ForkServer
from support.staged_job import (
    NUM_PARTS,
    NUM_ROWS,
    Engines,
    check_published,
    claim_attempt,
    plan_one_shard,
    run_only,
)

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import FencedError, StorageError
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.run import shard_queue as queue_module
from batchllm_operator.run.live_progress import LiveProgress
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import CLAIM_FILE, Attempt, claim_number
from batchllm_operator.shards.parts import ShardFiles
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    return plan_one_shard(lake_uri)


def shard_files(plan: StoredPlan) -> dict[str, bytes]:
    folder = plan.run_folder(0)
    return {name: folder.read_bytes(name) for name in folder.find()}


def attempts_of_parts(plan: StoredPlan) -> list[int]:
    return [entry.attempt for entry in ShardFiles.of(plan, 0).ledger().values()]


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


class KilledError(Exception):
    pass


def _die() -> None:
    raise KilledError


# Side by side


@pytest.mark.parametrize("at", [0, 4, 7, 29])
def test_a_zombie_stops_when_another_has_taken_over(
    plan: StoredPlan, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Attempt 2 does all of its work while attempt 1 is about to answer request `at`."""
    successor = Engines()
    zombie = Engines(at, lambda: run_worker(plan, owner="task", start=successor))
    report = run_worker(plan, owner="task", start=zombie)
    assert (report.shards, report.num_finished) == ({}, 1)
    assert re.search(r"attempt 2 .* taken over from attempt 1, which stops", caplog.text)
    num_kept = at // 5
    assert attempts_of_parts(plan) == [1] * num_kept + [2] * (NUM_PARTS - num_kept)
    assert successor.num_answers == NUM_ROWS - 5 * num_kept
    assert zombie.num_answers == 5 * (num_kept + 1), "at most one part that doesn't count"
    assert verify_worker(plan.folder.uri).shards[0].num_resumed_parts == num_kept
    assert commit_run(plan.folder.uri).num_rows_out == NUM_ROWS
    check_published(plan)


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
            run_worker(plan, owner="task")

    monkeypatch.setattr(Attempt, "check_current", check)
    assert run_worker(plan, owner="task").shards == {}
    assert plan.run_folder(0).exists("attempt-00001/part-00000.json")
    assert attempts_of_parts(plan) == [2] * NUM_PARTS
    commit_run(plan.folder.uri)
    check_published(plan)


def test_what_was_finished_before_the_claim_is_not_generated_again(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is read again once the claim is made: attempt 1 went on until then."""
    with pytest.raises(KilledError):
        run_worker(plan, owner="task", start=Engines(8, _die))

    def claim(*claimed: Any) -> Attempt | None:
        monkeypatch.setattr(queue_module, "claim_number", claim_number)
        run_only(plan, 0)
        plan.run_folder(0).remove("report.json")
        return claim_attempt(claimed[0], "task")

    monkeypatch.setattr(queue_module, "claim_number", claim)
    engines = Engines()
    report = run_worker(plan, owner="task", start=engines)
    assert engines.started == []
    assert report.shards[0].num_resumed_parts == NUM_PARTS
    assert set(attempts_of_parts(plan)) == {1, 2}


def test_a_report_is_that_of_the_latest_attempt(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plan.run_folder(0)
    count_part = LiveProgress.count_part

    def claim_after_the_last(tally: LiveProgress) -> None:
        count_part(tally)
        if tally.snapshot().num_parts_done == NUM_PARTS:
            claim_attempt(folder, "other")

    with monkeypatch.context() as patch:
        patch.setattr(LiveProgress, "count_part", claim_after_the_last)
        assert run_only(plan, 0) == {}
    assert not folder.exists("report.json")
    report = run_worker(plan, owner="other")
    assert report.shards[0].num_resumed_parts == NUM_PARTS
    assert verify_worker(plan.folder.uri) == report


def test_processes_side_by_side(
    plan_of_slow_requests: StoredPlan, commands: ForkServer, tmp_path: Path
) -> None:
    """A pod that was cut off, as SIGSTOP does it, comes back when another has done its work."""
    plan = plan_of_slow_requests
    command = "batchllm_operator", ["run", "--plan", plan.folder.uri, "--owner", "task"]
    with (tmp_path / "stderr").open("w") as stderr:
        zombie = commands.start(*command, stderr=stderr.fileno())
        wait_until(lambda: attempts_of_parts(plan), "the first part is finished")
        zombie.send_signal(signal.SIGSTOP)
        num_kept = len(attempts_of_parts(plan))
        assert commands.run(*command).returncode == 0
        commit_run(plan.folder.uri)
        zombie.send_signal(signal.SIGCONT)
        code = zombie.wait(timeout=60)
    assert code == 0
    assert "has taken over from attempt 1" in (tmp_path / "stderr").read_text()
    assert num_kept < NUM_PARTS
    assert attempts_of_parts(plan) == [1] * num_kept + [2] * (NUM_PARTS - num_kept)
    check_published(plan)


@pytest.fixture
def plan_of_slow_requests(lake_uri: str) -> StoredPlan:
    return plan_one_shard(lake_uri, engine={"extra_args": {"delay_s": 0.05, "max_in_flight": 1}})


# Killed, damaged


KILLED_BEFORE_AN_ENTRY = """
import os, signal, sys
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import Attempt

looks = []
def check(self):
    looks.append(self)
    if len(looks) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Attempt.check_current = check
run_worker(sys.argv[1])
"""


def test_killed_between_a_parts_file_and_its_entry(plan: StoredPlan) -> None:
    command = [sys.executable, "-P", "-c", KILLED_BEFORE_AN_ENTRY, plan.folder.uri]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    before = shard_files(plan)
    [orphan] = [name for name in before if "part-00002-" in name]
    assert attempts_of_parts(plan) == [1, 1]
    engines = Engines()
    run_worker(plan, start=engines)
    assert engines.num_answers == NUM_ROWS - 10
    after = shard_files(plan)
    assert {name: after[name] for name in before} == before, "it stays for who looks into it"
    assert orphan in after
    commit_run(plan.folder.uri)
    check_published(plan)


def test_files_and_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file the content, then its name; of each new folder its name, too."""
    # Another thread's files would come in between.
    monkeypatch.setattr(LiveProgress, "start", lambda self: None)
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
    run_worker(plan)
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
