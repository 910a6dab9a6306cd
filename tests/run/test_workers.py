"""Workers share a plan's shards: each is run once, and none is lost with its worker (ADR 33)."""

import itertools
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shard_progress import leave_progress
from support.staged_job import Engines, check_published, claim_attempt, plan_one_shard, run_only

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import (
    EngineError,
    FencedError,
    IncompleteRunError,
    Interrupted,
    PlanError,
)
from batchllm_operator.inspect.verify import verify_worker
from batchllm_operator.run.draining import Drain
from batchllm_operator.run.live_progress import Holder
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.run.shard_queue import Claimed, ShardQueue, runs_of
from batchllm_operator.run.worker import MOST_WAIT_S, Worker
from batchllm_operator.shards import attempts as attempts_module
from batchllm_operator.shards.attempts import read_claim
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NUM_SHARDS = 8


@pytest.fixture
def plan(lake_uri: str) -> StoredPlan:
    plan = plan_one_shard(lake_uri, planner={"num_shards": NUM_SHARDS})
    assert len(plan.manifest.shards) == NUM_SHARDS
    return plan


class Time:
    """A clock that tests set; hosts' clocks may differ from it by `ahead_s`."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s

    def now(self, ahead_s: float = 0.0) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.s + ahead_s)


@pytest.fixture
def clock() -> Time:
    return Time()


def queue_of(
    plan: StoredPlan, worker: int, num_workers: int, clock: Time, owner: str | None = None
) -> ShardQueue:
    return ShardQueue(plan, worker, num_workers, owner=owner, clock=clock, now=clock.now)


def holder(drain: Drain | None = None) -> Holder:
    """Progress objects come every hour: tests write their own."""
    return Holder(every_s=3600.0, drain=drain or Drain())


def write_progress(plan: StoredPlan, claimed: Claimed, at: datetime, **changes: Any) -> None:
    seen = {"started_at": at, "updated_at": at, "num_rows_done": 0, **changes}
    leave_progress(plan, claimed.shard_idx, claimed.attempt.number, **seen)


def finish(plan: StoredPlan, queue: ShardQueue, claimed: Claimed) -> None:
    reports = run_only(plan, claimed.shard_idx)
    queue.ended(reports[claimed.shard_idx])


def claim(queue: ShardQueue) -> Claimed:
    claimed = queue.take()
    assert claimed is not None
    return claimed


def taken(queue: ShardQueue) -> list[int]:
    """What a worker claims when nothing ends and nobody else claims."""
    return [claimed.shard_idx for claimed in iter(queue.take, None)]


# Which shard


def test_a_worker_takes_its_own_run_and_then_the_far_ends_of_others(
    plan: StoredPlan, clock: Time
) -> None:
    first = queue_of(plan, 0, 2, clock)
    own = first.own()
    assert own == list(range(len(own)))
    order = taken(first)
    assert order[: len(own)] == own
    assert order[len(own) :] == list(reversed(range(len(own), NUM_SHARDS)))
    assert taken(queue_of(plan, 1, 2, clock)) == []


def test_help_goes_where_the_most_work_is_left(plan: StoredPlan, clock: Time) -> None:
    queues = [queue_of(plan, worker, 3, clock) for worker in range(3)]
    mine, *others = [queue.own() for queue in queues]
    for _ in range(len(others[0]) - 1):
        assert queues[1].take() is not None
    order = taken(queues[0])
    assert order[: len(mine)] == mine
    assert order[len(mine)] == others[1][-1]  # of whose run nothing has begun


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.integers(1, 50),
)
def test_runs_are_consecutive_and_about_equal(work: list[float], num_workers: int) -> None:
    owner = runs_of(np.array(work), num_workers)
    assert np.all(np.diff(owner) >= 0)
    assert owner.min() >= 0 and owner.max() < num_workers
    if sum(work) > 0:
        parts = np.bincount(owner, work, minlength=num_workers)
        assert parts.max() <= sum(work) / num_workers + max(work) * (1 + 1e-9)


def test_runs_without_predicted_work_have_equal_numbers_of_shards() -> None:
    assert runs_of(np.zeros(4), 2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "workers",
    [[(worker, 20) for worker in range(20)], [(0, 1), (0, 1)]],
    ids=["more workers than shards", "two of the same number"],
)
def test_each_shard_is_claimed_once(
    plan: StoredPlan, clock: Time, workers: list[tuple[int, int]]
) -> None:
    queues = itertools.cycle([queue_of(plan, *worker, clock) for worker in workers])
    tries = [queue.take() for queue in itertools.islice(queues, 20)]
    claimed = [each for each in tries if each is not None]
    assert sorted(each.shard_idx for each in claimed) == list(range(NUM_SHARDS))
    assert all(each.attempt.number == 1 for each in claimed)


def test_of_two_that_see_the_same_shard_free_one_takes_another(
    plan: StoredPlan, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = queue_of(plan, 0, 1, clock), queue_of(plan, 0, 1, clock)
    look, is_first = mine.look, True

    def look_then_lose() -> None:
        nonlocal is_first
        look()
        if is_first:
            is_first = False
            lost = other.take()
            assert lost is not None and lost.shard_idx == 0

    monkeypatch.setattr(mine, "look", look_then_lose)
    claimed = mine.take()
    assert claimed is not None and claimed.shard_idx == 1


# Slow workers


def beside_a_faster_worker(
    plan: StoredPlan, clock: Time, num_by_other: int
) -> tuple[ShardQueue, Claimed]:
    """A worker after its first shard, while another has finished some and has claimed one more."""
    queue, other = (queue_of(plan, worker, 2, clock) for worker in range(2))
    own = claim(queue)
    for _ in range(num_by_other):
        clock.s += 10.0
        claimed = claim(other)
        finish(plan, other, claimed)
    finish(plan, queue, own)
    claimed = claim(other)
    write_progress(plan, claimed, clock.now())
    return queue, claimed


@pytest.mark.parametrize(("num_by_other", "num_claims"), [(0, 6), (1, 5), (2, 4), (3, 2), (4, 0)])
def test_a_worker_takes_what_it_finishes_in_time(
    plan: StoredPlan, clock: Time, num_by_other: int, num_claims: int
) -> None:
    queue, _ = beside_a_faster_worker(plan, clock, num_by_other)
    num_free = NUM_SHARDS - num_by_other - 2
    assert len(taken(queue)) == num_claims
    assert queue.stands_back == (num_claims < num_free)


def test_a_slow_worker_leaves_the_last_shards_to_faster_ones(plan: StoredPlan, clock: Time) -> None:
    queue, claimed = beside_a_faster_worker(plan, clock, 5)
    assert queue.take() is None
    assert queue.stands_back
    clock.s += 90.0  # the other one is lost
    assert claimed.shard_idx in taken(queue)
    assert not queue.stands_back


def test_it_waits_as_long_as_shards_are_free(plan: StoredPlan, clock: Time) -> None:
    class Queue(ShardQueue):
        @property
        def stands_back(self) -> bool:
            return clock.s < 1000.0

        @stands_back.setter
        def stands_back(self, stands_back: bool) -> None: ...

        def next_shard(self) -> int | None:
            return None

        def others(self) -> list[int]:
            return [1]

    worker = Worker(plan, Queue(plan, 0, 2), Engines(), holder(), clock=clock)
    for pause_s in worker.steps():
        clock.s += pause_s
    assert clock.s == pytest.approx(1000.0 + MOST_WAIT_S, abs=5.0)


# Lost or alive


@pytest.mark.parametrize("ahead_s", [0.0, 86_400.0, -86_400.0, 45.0, -45.0])
def test_a_live_attempt_is_never_taken_whatever_its_clock_says(
    plan: StoredPlan, clock: Time, ahead_s: float
) -> None:
    claimed = claim(queue_of(plan, 0, 1, clock))
    watcher = queue_of(plan, 1, 2, clock)
    for _ in range(60):
        write_progress(plan, claimed, clock.now(ahead_s))
        assert claimed.shard_idx not in {each.shard_idx for each in iter(watcher.take, None)}
        assert claimed.shard_idx in watcher.others()
        clock.s += 5.0


@pytest.mark.parametrize("ahead_s", [0.0, 86_400.0, -86_400.0])
def test_an_attempt_that_stands_still_is_taken_over_by_one(
    plan: StoredPlan, clock: Time, ahead_s: float
) -> None:
    claimed = claim(queue_of(plan, 0, 1, clock))
    write_progress(plan, claimed, clock.now(ahead_s))
    watchers = [queue_of(plan, worker, 2, clock) for worker in range(2)]
    heirs = []
    while clock.s < 90.0:
        for watcher in watchers:
            heirs += [each for each in iter(watcher.take, None) if each.shard_idx == 0]
        for heir in heirs:
            write_progress(plan, heir, clock.now())
        clock.s += 5.0
    assert [heir.attempt.number for heir in heirs] == [2]
    with pytest.raises(FencedError):
        claimed.attempt.check_current()


def test_a_claim_without_progress_is_lost_after_a_while(plan: StoredPlan, clock: Time) -> None:
    claim_attempt(plan.run_folder(0))
    queue = queue_of(plan, 0, 1, clock)
    assert 0 not in taken(queue)
    clock.s += 59.0
    assert taken(queue) == []
    clock.s += 2.0
    assert taken(queue) == [0]


def claimed_by_another_process(plan: StoredPlan, monkeypatch: pytest.MonkeyPatch) -> Claimed:
    """A live-looking attempt at shard 0 by a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(attempts_module.os, "getpid", lambda: process.pid)
        claimed = Claimed(0, claim_attempt(plan.run_folder(0)))
    write_progress(plan, claimed, datetime.now(UTC))
    return claimed


def test_a_process_that_is_gone_from_this_machine_is_not_waited_for(
    plan: StoredPlan, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed_by_another_process(plan, monkeypatch)
    assert 0 in taken(ShardQueue(plan, 0, 1, clock=clock))


def test_a_process_of_another_machine_or_container_is_waited_for(
    plan: StoredPlan, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed_by_another_process(plan, monkeypatch)
    monkeypatch.setattr(attempts_module, "_processes", lambda: "another boot pid:[1]")
    assert 0 not in taken(ShardQueue(plan, 0, 1, clock=clock))


@pytest.mark.parametrize("owner", ["task", "task/1"])
def test_an_earlier_try_of_the_same_task_is_taken_over_at_once(
    plan: StoredPlan, clock: Time, owner: str
) -> None:
    claimed = claim(queue_of(plan, 0, 1, clock, owner))
    write_progress(plan, claimed, clock.now())
    assert 0 not in taken(queue_of(plan, 0, 1, clock, "task2"))
    assert 0 in taken(queue_of(plan, 0, 1, clock, "task"))


def test_two_tries_of_one_task_do_not_fence_each_other_in_turn(
    plan: StoredPlan, clock: Time
) -> None:
    first = queue_of(plan, 0, 1, clock, "task")
    claimed = claim(first)
    write_progress(plan, claimed, clock.now())
    second = queue_of(plan, 0, 1, clock, "task")
    heir = second.take()
    assert heir is not None and (heir.shard_idx, heir.attempt.number) == (0, 2)
    write_progress(plan, heir, clock.now())
    with pytest.raises(FencedError):
        claimed.attempt.check_current()
    first.give_up(0)
    other = first.take()
    assert other is not None and other.shard_idx == 1
    write_progress(plan, other, clock.now())
    assert taken(second) == list(range(2, NUM_SHARDS))


def test_failed_shards_come_last_and_once(plan: StoredPlan, clock: Time) -> None:
    claimed = claim(queue_of(plan, 0, 1, clock))
    write_progress(plan, claimed, clock.now(), state="failed")
    queue = queue_of(plan, 0, 1, clock)
    assert taken(queue) == [*range(1, NUM_SHARDS), 0]
    again = Claimed(0, claim_attempt(plan.run_folder(0)))
    write_progress(plan, again, clock.now(), state="failed")
    queue.give_up(0)
    assert queue.take() is None
    assert queue.others() == []


# Whole runs


def test_one_engine_runs_all_shards(plan: StoredPlan) -> None:
    engines = Engines()
    report = run_worker(plan.folder.uri, 0, 1, start=engines)
    assert len(engines.started) == 1
    assert sorted(report.shards) == list(range(NUM_SHARDS))
    assert (report.num_finished, report.others) == (NUM_SHARDS, [])
    commit_run(plan.folder.uri)
    check_published(plan)
    assert run_worker(plan.folder.uri, 0, 1).num_finished == NUM_SHARDS  # committed


class Ahead(Engines):
    """Engines that get the next request when one of eight is answered, request 6 last of all."""

    def __call__(self, spec: Any, job: Any) -> Any:
        engine = super().__call__(spec, job)
        stream = engine.stream

        def ahead(requests: Iterator[Any]) -> Iterator[Any]:
            held = list(itertools.islice(requests, 8))
            while held:
                others = (idx for idx, each in enumerate(held) if each.request_idx != 6)
                yield from stream(iter([held.pop(next(others, 0))]))
                held += itertools.islice(requests, 1)

        engine.stream = ahead  # type: ignore[method-assign]
        return engine


def test_the_engine_is_not_drained_between_shards(plan: StoredPlan) -> None:
    progresses: list[Any] = []

    @contextmanager
    def observe(progress: Any) -> Iterator[None]:
        progresses.append(progress)
        yield
        assert progress.snapshot().state == "finished", "it is left after the last state"

    def check_open_shards() -> None:
        assert [each.snapshot().state for each in progresses[:2]] == ["running", "running"]

    last_of_first = plan.shard(0).num_requests - 1
    run_worker(plan, start=Ahead(at=last_of_first, act=check_open_shards), observe=observe)
    assert len(progresses) == NUM_SHARDS
    held = [each.snapshot().gpu_held_s for each in progresses]
    whole = progresses[-1].snapshot().updated_at - progresses[0].snapshot().started_at
    assert sum(held) <= whole.total_seconds() + 1e-3  # the GPU is counted once


def test_a_worker_goes_on_without_a_shard_that_was_taken_over(plan: StoredPlan) -> None:
    def take_over() -> None:
        for shard_idx in range(2):
            claim_attempt(plan.run_folder(shard_idx))

    at = plan.shard(0).num_requests  # the first request of shard 1
    drain = Drain()
    clock = Time()
    queue = queue_of(plan, 0, 1, clock)
    worker = Worker(plan, queue, Engines(at=at, act=take_over), holder(drain), clock=clock)
    for pause_s in worker.steps():
        clock.s += pause_s
    # Shard 0 was finished; the claim of shard 1 was made by hand, and shows no sign of life.
    assert sorted(worker.reports) == list(range(NUM_SHARDS))
    third = read_claim(plan.run_folder(1), 3)
    assert third is not None and third.worker == 0
    assert drain.num_open_parts() == 0


def test_a_shard_that_was_taken_over_between_its_parts_is_fed_no_more(
    lake_uri: str, clock: Time
) -> None:
    plan = plan_one_shard(lake_uri, planner={"num_shards": 2})
    heirs: list[Claimed] = []

    def take_over() -> None:
        heirs.append(Claimed(0, claim_attempt(plan.run_folder(0))))

    engines, queue = Engines(at=0, act=take_over), queue_of(plan, 0, 1, clock)
    worker = Worker(plan, queue, engines, holder(), clock=clock)
    for pause_s in worker.steps():
        write_progress(plan, heirs[0], clock.now())
        clock.s += pause_s
    assert plan.shard(0).num_parts > 1
    assert list(worker.reports) == [1]
    first_part = plan.manifest.spec.planner.part_rows
    assert engines.num_answers == first_part + plan.shard(1).num_requests


def test_a_shard_that_is_left_again_comes_back_once_the_engine_has_ended_its_requests(
    lake_uri: str, clock: Time
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "sampling": {"temperature": 1.0},
        "retry_invalid": 1,
    }
    plan = plan_one_shard(lake_uri, planner={"num_shards": 2}, **asked)

    def take_over_and_stop() -> None:
        heir = Claimed(0, claim_attempt(plan.run_folder(0)))
        write_progress(plan, heir, clock.now(), state="stopped")

    engines, queue = Ahead(at=0, act=take_over_and_stop), queue_of(plan, 0, 1, clock)
    worker = Worker(plan, queue, engines, holder(), clock=clock)
    for pause_s in worker.steps():
        clock.s += pause_s
    assert sorted(worker.reports) == [0, 1]
    assert queue.num_left == 0


def test_a_stopped_worker_counts_what_others_have_finished_since_its_last_look(
    lake_uri: str,
) -> None:
    plan = plan_one_shard(lake_uri, planner={"num_shards": 2})

    def stop_after_the_other() -> None:
        run_only(plan, 1)
        raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        run_worker(plan, 0, 2, start=Engines(3, stop_after_the_other))
    kept = plan.shard(1).num_rows + 3
    assert caught.value.__notes__[0].startswith(f"{kept} of the plan's 30 rows are finished")


def test_a_run_ends_at_its_next_claim_once_its_plan_is_gone(plan: StoredPlan) -> None:
    engines = Ahead(at=0, act=lambda: plan.folder.remove("manifest.json"))
    with pytest.raises(PlanError, match="has just removed it; make the plan again"):
        run_worker(plan, start=engines)
    assert engines.num_answers < plan.shard(0).num_requests


def test_a_damaged_shard_is_refused_once_the_one_before_is_finished(plan: StoredPlan) -> None:
    plan.folder.remove(plan.shard(1).file)
    engines = Engines()
    with pytest.raises(PlanError, match=r"shard-00001\.parquet is missing"):
        run_worker(plan, start=engines)
    assert verify_shards(plan) == {0}
    assert engines.num_answers == plan.shard(0).num_requests


def test_a_failing_worker_leaves_its_shard_to_others(plan: StoredPlan) -> None:
    with pytest.raises(EngineError):
        run_worker(plan.folder.uri, 0, 2, start=Engines(at=1, act=_fail))
    with pytest.raises(IncompleteRunError, match="no worker runs shard"):
        verify_worker(plan.folder.uri, 1, 2)
    report = run_worker(plan.folder.uri, 1, 2)
    assert report.num_finished == NUM_SHARDS
    assert verify_worker(plan.folder.uri, 1, 2).num_finished == NUM_SHARDS
    commit_run(plan.folder.uri)
    check_published(plan)


def test_draining_ends_open_parts_and_claims_nothing_more(plan: StoredPlan) -> None:
    drain = Drain()

    def stop() -> None:
        drain.has_begun = True

    with pytest.raises(Interrupted):
        run_worker(plan.folder.uri, 0, 1, start=Engines(at=0, act=stop), drain=drain)
    begun = plan.folder.child("runs").subfolder_names()
    assert len(begun) < NUM_SHARDS
    report = run_worker(plan.folder.uri, 2, 3)
    assert report.num_finished == NUM_SHARDS
    assert all(each.num_resumed_parts <= each.num_parts for each in report.shards.values())
    commit_run(plan.folder.uri)
    check_published(plan)


def test_a_worker_without_shards_waits_for_a_while_without_an_engine(
    plan: StoredPlan, clock: Time
) -> None:
    busy = queue_of(plan, 0, 1, clock)
    claimed = [*iter(busy.take, None)]
    engines = Engines()
    queue = queue_of(plan, 1, 2, clock)
    worker = Worker(plan, queue, engines, holder(), clock=clock)
    for pause_s in worker.steps():
        for each in claimed:
            write_progress(plan, each, clock.now())
        clock.s += pause_s
    assert engines.started == []
    assert clock.s == pytest.approx(MOST_WAIT_S, abs=5.0)
    assert queue.others() == list(range(NUM_SHARDS))


def test_verify_counts_the_owners_shards(plan: StoredPlan) -> None:
    with pytest.raises(EngineError):
        run_worker(plan.folder.uri, 0, 2, owner="a", start=Engines(at=16, act=_fail))
    finished = verify_shards(plan)
    report = run_worker(plan.folder.uri, 1, 2, owner="b")
    assert set(report.shards) == set(range(NUM_SHARDS)) - finished
    found = verify_worker(plan.folder.uri, 1, 2, owner="b")
    assert found.shards == report.shards
    assert set(verify_worker(plan.folder.uri, 0, 2, owner="a").shards) == finished


@pytest.mark.parametrize(("worker", "num_workers"), [(-1, 2), (0, 0)])
def test_there_is_no_such_worker(plan: StoredPlan, worker: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match="no such worker"):
        run_worker(plan.folder.uri, worker, num_workers)


def _fail() -> None:
    raise EngineError("killed")


def verify_shards(plan: StoredPlan) -> set[int]:
    return {idx for idx in range(NUM_SHARDS) if plan.run_folder(idx).exists("report.json")}


@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 1), (NUM_SHARDS, 2)])
def test_the_progress_line_counts_what_is_generated(
    lake_uri: str, capfd: pytest.CaptureFixture[str], num_shards: int, num_workers: int
) -> None:
    plan = plan_one_shard(lake_uri, planner={"num_shards": num_shards})
    with pytest.raises(EngineError):
        run_worker(plan.folder.uri, 0, num_workers, start=Engines(at=7, act=_fail))
    capfd.readouterr()
    engines = Engines()
    report = run_worker(plan.folder.uri, 0, num_workers, start=engines)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("worker 0")]
    num_left = engines.num_answers
    assert num_left < 30
    assert f"{num_left}/{num_left} rows (100 %)" in lines[-1]
    saving = Counts.total(shard.counts for shard in report.shards.values()).saving_ratio
    assert saving is not None and f"{100 * saving:.0f} % of prompt tokens saved" in lines[-1]
    if num_workers == 1:  # or it doesn't know yet what it will do of the others' work
        assert lines[0] == f"worker 0: {num_left} rows"
