"""Tasks that are killed, cleared or abandoned, and the tries that follow them."""

from __future__ import annotations

import pytest
from support.pod_shards import Shards, in_triggerer
from support.task_runs import TaskInstance


@pytest.mark.parametrize(
    ("shards", "state"), [("deferred", "failed"), ("sync", None)], indirect=["shards"]
)
def test_a_task_that_the_user_marks_or_clears_leaves_no_pod(
    shards: Shards, state: str | None
) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start()
    shards.working_pod(run)
    run.kill(state)
    assert run.failure() is not None
    shards.check_nothing_left()
    before = shards.parts()
    shards.start(TaskInstance(try_number=2)).wait()
    assert before.items() <= shards.parts().items()
    shards.check_whole()


def test_the_end_of_a_worker_leaves_the_pod_to_the_next_try(shards: Shards) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start()
    name = shards.working_pod(run)
    if shards.mode == "sync":
        shards.cluster.agent.freeze(name)
        run.kill("running")  # SIGTERM, but nobody has changed the task's state
        assert "the task was killed" in str(run.failure())
        assert shards.pod() == name
        run = shards.start(TaskInstance(try_number=2))
        shards.wait_until_watched(run)  # or the pod would have ended before it is found
        shards.cluster.agent.thaw(name)
        run.wait()
    else:
        run.restart_triggerer()
        run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # one pod did it all
    shards.check_whole()


@in_triggerer
def test_a_pod_on_its_way_out_is_waited_for(shards: Shards) -> None:
    shards.plan(delay_s=0.15)
    name = shards.abandoned_pod()
    shards.cluster.api.delete_namespaced_pod(name, shards.cluster.namespace)
    assert shards.cluster.pod(name) is not None  # it finishes its open parts
    run = shards.start(TaskInstance(try_number=2))
    seen: set[tuple[str, ...]] = set()

    def is_over() -> bool:
        seen.add(tuple(sorted(pod.metadata.name for pod in shards.cluster.pods())))
        return not run.is_alive

    shards.wait(is_over, "the task")
    run.wait()
    assert all(len(names) <= 1 for names in seen), "two pods of one shard at a time"
    shards.check_whole()
