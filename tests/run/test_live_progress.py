"""The progress object of an attempt: its states, its numbers, and that it is in nobody's way."""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.demo_job import wait_until
from support.staged_job import (
    NUM_PARTS,
    NUM_ROWS,
    Engines,
    plan_one_shard,
)

from batchllm_operator.engine import Engine, EngineJob
from batchllm_operator.errors import EngineError, Interrupted, StorageError
from batchllm_operator.run import live_progress as live
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import LiveProgress
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.attempts import PROGRESS_FILE, ShardProgress, attempt_name
from batchllm_operator.shards.job_status import read_attempts, read_status
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan


@pytest.fixture
def plan(tmp_path: Path) -> StoredPlan:
    """One shard of 30 requests in 6 parts."""
    return plan_one_shard(str(tmp_path))


def left(plan: StoredPlan, attempt: int = 1) -> ShardProgress:
    """What an attempt has left in the lake."""
    data = plan.run_folder(0).child(attempt_name(attempt)).read_bytes(PROGRESS_FILE)
    return ShardProgress.from_bytes(data, source="a test's")


def wait_for_state(plan: StoredPlan, state: str) -> None:
    def is_there() -> bool:
        try:
            return left(plan).state == state
        except FileNotFoundError:
            return False

    wait_until(is_there, f"progress says {state}", poll_s=0.01)


def test_a_finished_attempt_says_what_its_report_says(lake_uri: str) -> None:
    engine = {"extra_args": {"error_token_id": ord("3")}}
    plan = plan_one_shard(lake_uri, engine=engine, max_failed_fraction=1.0)
    report = run_worker(plan).shards[0]
    found = left(plan)
    assert (found.state, found.eta_s, found.error) == ("finished", 0.0, None)
    assert (found.num_rows, found.num_parts) == (NUM_ROWS, NUM_PARTS)
    assert found.done == report.counts.model_copy(update={"engine_s": found.done.engine_s})
    assert found.done.num_failed_rows > 0 and found.done.num_cached_tokens > 0
    assert found.num_parts_done == report.num_parts
    assert (found.num_gpus, found.gpu_s) == (0, 0.0)
    assert 0 <= found.engine_start_s <= found.elapsed_s
    assert read_status(plan).is_finished


def test_a_drained_attempt_keeps_what_its_parts_hold(lake_uri: str) -> None:
    plan = plan_one_shard(lake_uri)
    with pytest.raises(Interrupted), Drain().on_sigterm(60.0) as drain:
        stop = Engines(at=6, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
        run_worker(plan, start=stop, drain=drain, num_gpus=1)
    stopped = left(plan)
    assert (stopped.state, stopped.done.num_rows, stopped.num_parts_done) == ("stopped", 10, 2)
    assert (stopped.eta_s, stopped.error) == (None, None)
    run_worker(plan, num_gpus=2)
    finished = left(plan, 2)
    assert (finished.state, finished.done.num_rows) == ("finished", NUM_ROWS)
    attempts = read_attempts(plan)[0]
    first_s, second_s = stopped.gpu_held_s, finished.gpu_held_s
    assert first_s is not None and second_s is not None
    assert 0 < first_s <= stopped.elapsed_s
    assert 0 < second_s <= finished.elapsed_s
    assert attempts.gpu_s == pytest.approx(first_s + 2 * second_s)


@pytest.mark.parametrize("in_start", [True, False])
def test_a_failure_is_shown_without_secrets(
    plan: StoredPlan, in_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0pen-sesame")

    def fail() -> None:
        raise EngineError(f"no: 0pen-sesame at s3://me:word@host/ {'x' * 500}\nsecond line")

    def start(spec: JobSpec, job: EngineJob) -> Engine:
        if in_start:
            fail()
        return Engines(at=13, act=fail)(spec, job)

    with pytest.raises(EngineError):
        run_worker(plan, start=start)
    failed = left(plan)
    assert failed.state == "failed" and failed.error is not None
    assert failed.error.startswith("no: *** at s3://***@host/ xxx") and failed.error[-1] == "…"
    assert len(failed.error) == 300
    assert read_status(plan).shards[0].error == failed.error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("\n\n  what is wrong \n more"), "ValueError: what is wrong"),
        (ValueError(), "ValueError"),
        (EngineError(""), "EngineError"),
        (EngineError("half \ud800"), "half ?"),
    ],
)
def test_errors_are_shown_by_one_line(error: Exception, shown: str) -> None:
    assert live.shown_error(error) == shown


def test_a_fenced_attempt_has_failed_and_the_later_one_counts(plan: StoredPlan) -> None:
    def other() -> None:
        run_worker(plan, owner="task")

    run_worker(plan, owner="task", start=Engines(at=8, act=other))
    assert (left(plan, 1).state, left(plan, 2).state) == ("failed", "finished")
    assert read_status(plan).shards[0].state == "finished"


class BadStorage:
    """Progress objects can't be written while `is_bad`; all else can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_bad, self.num_tries, self.written = True, 0, list[ShardProgress]()
        self._write_bytes = Folder.write_bytes
        monkeypatch.setattr(Folder, "write_bytes", lambda *args: self.write(*args))

    def write(self, folder: Folder, name: str, data: bytes) -> None:
        if name == PROGRESS_FILE:
            self.num_tries += 1
            if self.is_bad:
                self.fail()
            self.written.append(ShardProgress.from_bytes(data, source="a test's"))
        self._write_bytes(folder, name, data)

    def fail(self) -> None:
        raise StorageError("the storage is away")


def run_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LEAST_INTERVAL_S", 0.001)
    monkeypatch.setenv(live.INTERVAL_VARIABLE, "0.001")


def test_storage_that_fails_costs_one_warning(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_often(monkeypatch)
    storage = BadStorage(monkeypatch)
    waits = Engines(at=9, act=lambda: wait_until(lambda: storage.num_tries > 5, "five tries"))
    with caplog.at_level(logging.WARNING):
        assert run_worker(plan, start=waits).shards[0].counts.num_rows == NUM_ROWS
    assert [r.message for r in caplog.records if "progress" in r.message] == [
        "the run goes on, but its progress can't be seen: the storage is away"
    ]
    assert read_status(plan).shards[0].state == "finished"


def test_whatever_goes_wrong_once_is_tried_again(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_often(monkeypatch)
    snapshots = itertools.count()
    snapshot = LiveProgress.snapshot

    def fail_once(progress: LiveProgress) -> ShardProgress:
        if next(snapshots) == 0:
            raise RuntimeError("nobody thought of it")
        return snapshot(progress)

    monkeypatch.setattr(LiveProgress, "snapshot", fail_once)
    with caplog.at_level(logging.WARNING):
        run_worker(plan)
    assert left(plan).state == "finished"
    assert "the run goes on, but its progress can't be seen: nobody thought of it" in caplog.text


def test_storage_that_hangs_does_not_keep_the_run(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_END_WAIT_S", 0.01)
    storage, release = BadStorage(monkeypatch), threading.Event()
    monkeypatch.setattr(storage, "fail", lambda: release.wait(60))
    assert run_worker(plan).shards[0].counts.num_rows == NUM_ROWS
    assert not release.is_set() and not storage.written
    assert "the storage takes long" in caplog.text
    storage.is_bad = False
    release.set()
    wait_for_state(plan, "finished")


def test_it_is_replaced_only_so_often(plan: StoredPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(live.INTERVAL_VARIABLE, "60")
    storage = BadStorage(monkeypatch)
    storage.is_bad = False
    run_worker(plan)
    states = [each.state for each in storage.written]
    assert len(states) == len(set(states)) <= 3 and states[-1] == "finished"
    assert left(plan).interval_s == 60


def test_it_is_refreshed_while_nothing_finishes(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_often(monkeypatch)
    storage = BadStorage(monkeypatch)
    storage.is_bad = False

    def refreshed(state: str) -> Callable[[], None]:
        def is_so() -> bool:
            return [each.state for each in storage.written].count(state) >= 3

        return lambda: wait_until(is_so, f"{state} was written again", poll_s=0.01)

    def start(spec: JobSpec, job: EngineJob) -> Engine:
        refreshed("starting")()
        return Engines(at=0, act=refreshed("running"))(spec, job)

    run_worker(plan, start=start)
    ages = [each.elapsed_s for each in storage.written]
    assert ages == sorted(ages)


def test_a_process_that_hangs_refreshes_it_no_longer(
    plan: StoredPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_often(monkeypatch)
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    storage, looks = BadStorage(monkeypatch), list[ShardProgress]()
    storage.is_bad = False
    snapshot = LiveProgress.snapshot

    def looked_at(progress: LiveProgress) -> ShardProgress:
        looks.append(snapshot(progress))
        return looks[-1]

    monkeypatch.setattr(LiveProgress, "snapshot", looked_at)

    def hang() -> None:
        num_before = len(looks)
        wait_until(lambda: len(looks) > num_before + 5, "five more looks", poll_s=0.01)

    run_worker(plan, start=Engines(at=13, act=hang))
    told = [(each.state, each.done.num_rows) for each in storage.written]
    assert len(told) == len(set(told)) < len(looks) and told[-1] == ("finished", NUM_ROWS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 5.0), ("2.5", 2.5), ("1e-9", 0.1), ("1e9", 60.0)]
    + [(text, 5.0) for text in ("often", "nan", "inf", "-1", "0")],
)
def test_the_environment_sets_the_interval(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(live.INTERVAL_VARIABLE, text)
    assert live.interval_s() == seconds
    is_refused = seconds == 5.0 and text != ""
    assert (f"{text!r} isn't a number of seconds" in caplog.text) == is_refused
