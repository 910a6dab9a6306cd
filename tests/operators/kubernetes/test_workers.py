"""The workers of a Job: how many there are, and when none is needed any more."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from support.kubernetes.pod_worker import Image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance

from batchllm_operator.operators import BatchLLMGenerateOperator
from batchllm_operator.operators.command import BatchLLMCommandOperator

FREE = "plan p: 3 of 4 shards finished, and no worker runs shard 3"
PLAN = "/lake/_batchllm/job/2026-01-31/plan-1"
SOON: dict[str, Any] = {"num_workers": 2, "look_interval": timedelta(seconds=0.2)}


def found(num_finished: int) -> dict[str, Any]:
    """What `verify` returns if nothing is free to run."""
    return {"plan_uri": PLAN, "num_shards": 4, "num_finished": num_finished, "num_rows": 6}


DONE, OTHERS_DO = found(4), found(3)


class Lake:
    """What `batchllm verify` says of a plan."""

    def __init__(self) -> None:
        self.says: Callable[[], dict[str, Any] | str] = lambda: FREE
        self.num_looks = 0

    def verify(self, *arguments: str) -> dict[str, Any] | str:
        said = self.says()
        self.num_looks += 1
        return said


@pytest.fixture
def lake(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """In place of the one of `shards`; a pod that is asked to stop does so at once."""
    lake = Lake()
    shards.plan_uri = PLAN
    monkeypatch.setattr(BatchLLMCommandOperator, "run_verify", lambda _, *each: lake.verify(*each))
    shards.cluster.agent.add_image("job:1", Image(command=["sleep", "600"]))
    return lake


def check_looks(shards: Shards, lake: Lake) -> None:
    before = lake.num_looks
    shards.wait(lambda: lake.num_looks > before + 2, "looks at the lake")


def running(shards: Shards) -> list[str]:
    return [pod.metadata.name for pod in shards.live() if pod.status.phase == "Running"]


@in_triggerer
def test_the_workers_of_one_job_run_the_shards_of_a_plan(shards: Shards) -> None:
    shards.plan(num_shards=4, delay_s=0.05)
    run = shards.start(num_workers=2)
    job = shards.job()
    assert (job.spec.completions, job.spec.parallelism) == (2, 2)
    assert job.spec.completion_mode == "Indexed"
    assert run.wait()["num_rows"] == NUM_ROWS
    shards.check_whole()


@in_triggerer
def test_a_workers_next_pod_goes_on_where_it_was_lost(shards: Shards) -> None:
    """Its own attempt, which gave a sign a moment ago, doesn't count as another's."""
    shards.plan(delay_s=1.0 if shards.cluster.backend.has_nodes else 0.05)
    run = shards.start()
    name = shards.pod()
    before = shards.wait_for_parts(1)
    shards.cluster.agent.oom_kill(name)
    assert "OOMKilled" in str(run.failure())
    run = shards.start(TaskInstance(try_number=2))
    shards.wait_for_parts(len(before) + 1)
    shards.cluster.agent.evict(shards.pod())
    assert run.wait()["num_rows"] == NUM_ROWS
    assert before.items() <= shards.parts().items()
    shards.check_whole()


def test_a_job_whose_pods_have_no_node_is_deleted_when_all_is_done(
    shards: Shards, lake: Lake
) -> None:
    shards.cluster.agent.hold_scheduling()
    run = shards.start(**SOON)
    job = shards.job()
    check_looks(shards, lake)
    assert shards.job().metadata.uid == job.metadata.uid
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


@in_triggerer
def test_pods_that_hang_are_removed_when_all_is_done(shards: Shards, lake: Lake) -> None:
    run = shards.start(**SOON)
    shards.wait(lambda: len(running(shards)) == 2, "both pods")
    check_looks(shards, lake)
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


@in_triggerer
def test_a_worker_that_finds_nothing_left_lets_the_task_look_at_once(
    shards: Shards, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may hang, or wait for a node."""
    script = 'if [ "$JOB_COMPLETION_INDEX" = 1 ]; then exit 0; else sleep 600; fi'
    shards.cluster.agent.add_image("job:1", Image(command=["sh", "-c", script]))
    run = shards.start(num_workers=2, look_interval=timedelta(hours=1))
    lake.says = lambda: DONE if run.num_deferrals else FREE
    assert run.wait() == DONE


@in_triggerer
def test_waiting_pods_are_removed_when_the_running_ones_have_all_that_is_left(
    shards: Shards, lake: Lake
) -> None:
    node = {"node_selector": {"kubernetes.io/os": "linux"}}
    shards.cluster.agent.set_capacity({"nvidia.com/gpu": "2"})
    run = shards.start(gpu="nvidia", **SOON | {"num_workers": 3}, **node)
    shards.wait(lambda: len(running(shards)) == 2, "two pods")
    assert len(shards.live()) == 3
    lake.says = lambda: OTHERS_DO
    shards.wait(lambda: len(shards.live()) == 2, "the third pod to go")
    assert len(running(shards)) == 2
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


@in_triggerer
def test_a_job_is_scaled_when_the_number_of_workers_changes(shards: Shards, lake: Lake) -> None:
    wanted = [2]

    def make() -> BatchLLMGenerateOperator:
        return shards.task(**SOON | {"num_workers": str(wanted[0])})

    run = shards.start_task(make)
    shards.wait(lambda: len(running(shards)) == 2, "two pods")
    first = set(running(shards))
    wanted[0] = 3
    shards.wait(lambda: len(running(shards)) == 3, "three pods")
    assert first <= set(running(shards))
    wanted[0] = 1
    shards.wait(lambda: len(running(shards)) == 1, "one pod")
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()


@in_worker
def test_a_look_that_fails_does_not_end_the_task(shards: Shards, lake: Lake) -> None:
    run = shards.start(**SOON)
    shards.pod_names(2)
    looked: list[bool] = []

    def fail() -> str:
        looked.append(True)
        raise AirflowFailException("the lake is away")

    lake.says = fail
    shards.wait(lambda: len(looked) > 2, "looks at the lake")
    lake.says = lambda: DONE
    assert run.wait() == DONE
    shards.check_nothing_left()
