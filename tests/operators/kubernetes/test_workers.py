"""Tasks of workers: each ends when nothing is left for it, whatever its pod does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from support.kubernetes.images import Image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.operators.pods import waiting
from batchllm_operator.operators.pods.owner import LABEL
from batchllm_operator.operators.pods.pod_task import BatchLLMPodTask

FREE = "shard 3 of plan p: free to take"
PLAN = "/lake/_batchllm/job/2026-01-31/plan-1"
WORKER = {"worker": 1, "num_workers": 2}
SOON = {**WORKER, "look_interval": timedelta(seconds=0.2)}


def found(num_finished: int) -> dict[str, Any]:
    """What `verify` returns if nothing is left for a worker."""
    return {"plan_uri": PLAN, "num_shards": 4, "num_finished": num_finished, "num_rows": 6}


DONE, OTHERS_DO = found(4), found(3)


class Lake:
    """What `batchllm verify` says of a plan for a worker."""

    def __init__(self) -> None:
        self.says: Callable[[], dict[str, Any] | str] = lambda: FREE
        self.num_looks = 0
        self.asked: set[tuple[str, ...]] = set()

    def verify(self, *arguments: str) -> dict[str, Any] | str:
        self.asked.add(arguments)
        said = self.says()
        self.num_looks += 1
        return said


@pytest.fixture
def lake(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """In place of the one of `shards`; a pod that is asked to stop does so at once."""
    lake = Lake()
    shards.plan_uri = PLAN
    monkeypatch.setattr(CommandRunner, "verify", lambda _, *each: lake.verify(*each))
    shards.cluster.agent.add_image("job:1", Image(replaced_command=["sleep", "600"]))
    return lake


def check_looks(shards: Shards, lake: Lake) -> None:
    before = lake.num_looks
    shards.wait(lambda: lake.num_looks > before + 2, "looks at the lake")


def test_workers_run_the_shards_of_a_plan_in_pods(shards: Shards) -> None:
    shards.plan(num_shards=4, delay_s=0.02)
    tasks = [TaskInstance(map_index=worker) for worker in range(2)]
    runs = [shards.start(ti, **WORKER | {"worker": ti.map_index}) for ti in tasks]
    results = [run.wait() for run in runs]
    assert all(isinstance(each, str | int | float) for made in results for each in made.values())
    assert {made["plan_uri"] for made in results} == {shards.plan_uri}
    assert sum(made["num_rows"] for made in results) == NUM_ROWS
    shards.check_whole()
    shards.cluster.agent.hold_scheduling()  # a pod would wait for ever
    late = shards.start(TaskInstance(map_index=5), **WORKER | {"worker": 5, "num_workers": 6})
    made = late.wait()
    assert (made["num_finished"], made["num_rows"]) == (4, 0)


@in_triggerer
def test_a_workers_next_pod_goes_on_where_it_was_lost(shards: Shards) -> None:
    """Its own attempt, which gave a sign a moment ago, doesn't count as another's."""
    shards.plan(delay_s=0.05)
    alone = WORKER | {"worker": 0, "num_workers": 1}
    run = shards.start(**alone)
    name = shards.pod()
    before = shards.wait_for_parts(1)
    shards.cluster.agent.oom_kill(name)
    assert "OOMKilled" in str(run.failure())
    run = shards.start(TaskInstance(try_number=2), **alone)
    shards.wait_for_parts(len(before) + 1)
    shards.cluster.agent.evict(shards.pod())
    assert run.wait()["num_rows"] == NUM_ROWS
    assert before.items() <= shards.parts().items()
    shards.check_whole()


@in_triggerer
def test_a_worker_that_comes_too_late_makes_no_pod(shards: Shards, lake: Lake) -> None:
    lake.says = lambda: OTHERS_DO
    shards.cluster.double.deny("create", "pods")
    assert shards.start(**WORKER).wait()["num_finished"] == 3


def test_a_pod_without_a_node_is_removed_when_all_is_done(shards: Shards, lake: Lake) -> None:
    shards.cluster.agent.hold_scheduling()
    run = shards.start(**SOON)
    (pod,) = shards.wait(shards.live, "a pod")
    labels = pod.metadata.labels
    assert labels[f"{LABEL}/worker"] == "1" and f"{LABEL}/shard" not in labels
    check_looks(shards, lake)
    assert [each.metadata.uid for each in shards.live()] == [pod.metadata.uid]
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()
    owner = labels[f"{LABEL}/attempt"]
    of_worker = ("--plan", PLAN, "--worker", "1", "--num-workers", "2", "--owner", owner)
    assert lake.asked == {of_worker}


@in_triggerer
def test_a_pod_that_hangs_is_removed_when_all_is_done(shards: Shards, lake: Lake) -> None:
    run = shards.start(**SOON)
    shards.pod()
    check_looks(shards, lake)
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


def test_a_pod_is_not_needed_while_others_do_the_rest(shards: Shards, lake: Lake) -> None:
    run = shards.start(**SOON)
    shards.pod()
    lake.says = lambda: OTHERS_DO
    assert run.wait() == OTHERS_DO
    shards.check_nothing_left()


@in_triggerer
def test_what_a_pod_takes_up_while_it_is_removed_is_done_by_another(
    shards: Shards, lake: Lake
) -> None:
    """Nobody else would do it: its task is the one that is answerable."""
    run = shards.start(**SOON)
    shards.pod()
    (first,) = shards.live()

    def say() -> dict[str, Any] | str:
        """That nothing is left, for the first pod only, and only while it isn't being removed."""
        return OTHERS_DO if first.metadata.uid in {p.metadata.uid for p in shards.live()} else FREE

    lake.says = say
    shards.wait(lambda: {p.metadata.uid for p in shards.live()} - {first.metadata.uid}, "another")
    assert run.error is None and run.result is None
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


def test_a_look_that_fails_does_not_end_the_task(
    shards: Shards, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_VERIFY_PAUSES_S", ())
    run = shards.start(**SOON)
    shards.pod()
    looked: list[bool] = []

    def fail() -> str:
        looked.append(True)
        raise AirflowFailException("the lake is away")

    lake.says = fail
    shards.wait(lambda: len(looked) > 2, "looks at the lake")
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


@in_worker
def test_a_worker_that_waits_for_a_quota_ends_when_all_is_done(shards: Shards, lake: Lake) -> None:
    shards.cluster.set_quota({"pods": "0"})
    run = shards.start(**WORKER)
    check_looks(shards, lake)
    lake.says = lambda: DONE
    assert run.wait() == DONE


@in_triggerer
def test_lines_of_the_log_are_repeated_once_in_the_worker_when_a_task_looks(
    shards: Shards, lake: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    """The triggerer has them in a file that the next deferral empties."""
    command = ["sh", "-c", "echo this once; sleep 600"]
    shards.cluster.agent.add_image("job:1", Image(replaced_command=command))
    run = shards.start(**SOON)
    seen = ""

    def is_seen() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return "this once" in seen

    shards.wait(is_seen, "the line")
    check_looks(shards, lake)
    lake.says = lambda: DONE
    run.wait()
    assert run.num_deferrals > 2
    seen += "".join(capfd.readouterr())
    assert seen.count("this once") == 2


@in_worker
def test_lines_of_the_log_are_passed_on_once_where_the_worker_watches(
    shards: Shards, lake: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "echo this once; sleep 600"]
    shards.cluster.agent.add_image("job:1", Image(replaced_command=command))
    run = shards.start(**SOON)
    shards.pod()
    check_looks(shards, lake)
    lake.says = lambda: DONE
    run.wait()
    assert "".join(capfd.readouterr()).count("this once") == 1


@in_triggerer
def test_lines_that_the_worker_could_not_repeat_are_logged_by_the_next_watch(
    shards: Shards, lake: Lake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "echo this once; sleep 600"]
    shards.cluster.agent.add_image("job:1", Image(replaced_command=command))
    monkeypatch.setattr(BatchLLMPodTask, "_watch_here", lambda *_: None)
    run = shards.start(**SOON)
    check_looks(shards, lake)
    lake.says = lambda: DONE
    run.wait()
    assert "".join(capfd.readouterr()).count("this once") == run.num_deferrals


@in_triggerer
def test_a_pod_that_ends_while_a_shard_is_free_fails_the_try_and_the_next_makes_another(
    shards: Shards, lake: Lake
) -> None:
    shards.cluster.agent.add_image("job:1", Image(replaced_command=["true"]))
    error = shards.start(**WORKER).failure()
    assert isinstance(error, AirflowException) and not isinstance(error, AirflowFailException)
    assert FREE in str(error)
    shards.check_nothing_left()
    num_looks = lake.num_looks
    lake.says = lambda: FREE if lake.num_looks == num_looks else DONE  # before the pod, and after
    assert shards.start(TaskInstance(try_number=2), **WORKER).wait() == DONE
    assert lake.num_looks == num_looks + 2


def test_a_killed_worker_leaves_no_pod(shards: Shards, lake: Lake) -> None:
    run = shards.start(**WORKER)
    shards.pod()
    shards.wait_until_watched(run)
    run.kill("failed")
    run.failure()
    shards.check_nothing_left()


@in_worker
def test_a_worker_killed_while_it_looks_leaves_no_pod(shards: Shards, lake: Lake) -> None:
    run: TaskRun = shards.start(**SOON)
    shards.pod()

    def killed() -> str:
        run.kill("failed")
        raise AirflowException("batchllm verify was stopped: the task was killed")

    lake.says = killed
    assert "was killed" in str(run.failure())
    shards.check_nothing_left()


@in_triggerer
@pytest.mark.parametrize("num_workers", [2, 5])
def test_a_pod_is_taken_up_whatever_the_number_of_workers_is_now(
    shards: Shards, lake: Lake, num_workers: int
) -> None:
    """It does the same work, though it begins with other shards."""
    run = shards.start(**WORKER)
    shards.pod()
    (before,) = shards.live()
    shards.wait(lambda: run.is_deferred, "the trigger")
    run.kill("running")
    run.join()
    again = shards.start(TaskInstance(try_number=2), **SOON | {"num_workers": num_workers})
    shards.wait_until_watched(again)
    assert [pod.metadata.uid for pod in shards.live()] == [before.metadata.uid]
    lake.says = lambda: DONE
    assert again.wait() == DONE
    shards.check_nothing_left()
