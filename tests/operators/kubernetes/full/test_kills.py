"""Tasks that are killed, cleared or abandoned: the rest of the ways."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowTaskTimeout,
)
from airflow.sdk.execution_time.timeout import timeout
from operators.kubernetes.test_generate import check_adopted
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators.jobs.cluster_job import ClusterJob


@in_triggerer
def test_a_killed_job_finishes_its_open_parts(shards: Shards) -> None:
    run, _ = shards.at_work()
    run.kill("failed")
    run.failure()
    shards.check_nothing_left()
    assert len(shards.parts()) > 1  # those of the requests that the engine had


@in_triggerer
def test_a_job_goes_however_long_its_trigger_takes(shards: Shards) -> None:
    """Airflow cancels a trigger again while it still deals with the first time."""
    run, _ = shards.at_work(delay_s=0.15)
    run.state_takes_s = 1.0
    run.kill("failed")
    assert run.failure() is not None
    shards.check_nothing_left()


@in_triggerer
def test_a_deferral_that_airflow_ends_itself_leaves_no_job(shards: Shards) -> None:
    run, _ = shards.at_work(delay_s=0.15)
    run.kill("running")
    run.join()
    task = shards.task()
    with pytest.raises(AirflowException):
        task.resume_execution("__fail__", {"error": "Trigger timeout"}, run.context)
    shards.check_nothing_left()


@in_worker
def test_a_task_that_is_marked_while_no_answer_comes_leaves_no_job(shards: Shards) -> None:
    """Airflow kills the process five seconds later: the first request has to be the right one."""
    run, _ = shards.at_work()
    shards.cluster.proxy.slow(3600)  # requests arrive
    run.kill("failed")
    assert "was killed" in str(run.failure())
    shards.check_nothing_left()


@in_triggerer
def test_the_end_of_a_triggerer_leaves_the_job_to_the_next(shards: Shards) -> None:
    run, _ = shards.at_work()
    run.restart_triggerer()
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # one pod did it all
    shards.check_whole()


@in_triggerer
def test_a_triggerer_that_was_cut_off_leaves_the_job_to_the_other(shards: Shards) -> None:
    """Airflow 3.3 tells it that the user has killed the task, which is deferred elsewhere."""
    run, name = shards.at_work()
    shards.cluster.agent.freeze(name)
    run.kill("running")
    run.join()
    assert shards.pod() == name
    check_adopted(shards, name)


@in_triggerer
def test_a_job_of_an_earlier_try_that_has_failed_is_never_adopted(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    name = shards.abandoned_pod()
    before = shards.job().metadata.uid
    shards.cluster.agent.oom_kill(name)
    shards.wait(shards.has_ended, "the Job to fail")
    run = shards.start(TaskInstance(try_number=2))
    shards.wait(lambda: shards.jobs() and shards.job().metadata.uid != before, "another Job")
    run.wait()
    assert shards.report()["num_resumed_parts"] >= 1
    shards.check_whole()


@in_triggerer
def test_a_job_that_finished_meanwhile_is_deleted_and_its_results_count(shards: Shards) -> None:
    shards.plan(delay_s=0.02)
    shards.abandoned_pod()
    shards.wait(shards.has_ended, "the Job to end")
    result = shards.start(TaskInstance(try_number=2)).wait()
    assert result["num_rows"] == NUM_ROWS
    shards.check_whole()


@in_triggerer
def test_a_job_that_does_other_work_is_replaced_once_its_pods_are_gone(shards: Shards) -> None:
    """As when the spec was renamed and plan was cleared: all Jobs of a task have one name."""
    shards.plan(delay_s=0.15)
    name, job = shards.abandoned_pod(), shards.job()
    shards.plan(delay_s=0.0, name="renamed")
    run = shards.start(TaskInstance(try_number=2))
    seen: set[tuple[str, ...]] = set()
    jobs: dict[str, str] = {}

    def is_over() -> bool:
        seen.add(tuple(sorted(pod.metadata.name for pod in shards.cluster.pods())))
        jobs.update((each.metadata.uid, each.metadata.name) for each in shards.jobs())
        return not run.is_alive

    shards.wait(is_over, "the task")
    run.wait()
    assert (name,) in seen
    assert all(len(names) <= 1 for names in seen), "two sets of pods at a time"
    assert [*jobs.values()] == [job.metadata.name] * 2
    shards.check_whole()


def test_the_tasks_timeout_ends_the_job(shards: Shards) -> None:
    shards.plan(delay_s=1.0)
    limit = timedelta(seconds=3)
    if shards.mode == "deferred":
        error = shards.start(execution_timeout=limit).failure()
        assert "reached the task's execution_timeout" in str(error)
    else:
        task = shards.task(deferrable=False)
        run = TaskRun.__new__(TaskRun)  # for its context; Airflow's timeout needs the main thread
        run.ti = TaskInstance()
        execute = type(task).execute
        execute = getattr(execute, "__wrapped__", execute)
        with pytest.raises(AirflowTaskTimeout), timeout(limit.total_seconds()):
            execute(task, run.context)
        task.on_kill()  # as Airflow does then
    shards.check_nothing_left()


@in_worker
def test_a_task_whose_supervisor_died_leaves_the_job_to_the_next_try(shards: Shards) -> None:
    """Its own process knows nothing of that: it watches on, and a later try has the Job."""
    orphan, name = shards.at_work(TaskInstance(max_tries=0))
    shards.cluster.agent.freeze(name)
    run = shards.start(TaskInstance(try_number=2))
    shards.wait_until_watched(run)
    assert shards.pod() == name
    run.kill("failed")
    run.failure()
    shards.cluster.agent.thaw(name)
    orphan.failure()
    shards.check_nothing_left()


@in_triggerer
def test_a_try_that_goes_on_after_the_next_has_begun_makes_no_second_job(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine stood still before it asked for a Job."""
    shards.plan(delay_s=0.1)
    has_come, goes_on = threading.Event(), threading.Event()
    take, first = ClusterJob.take, TaskInstance()

    async def late(self: ClusterJob, body: Any, secret: Any) -> Any:
        if self.of.try_id == str(first.id):
            has_come.set()
            assert goes_on.wait(180)
        return await take(self, body, secret)

    monkeypatch.setattr(ClusterJob, "take", late)
    earlier = shards.start(first)
    assert has_come.wait(180)
    later = shards.start(TaskInstance(try_number=2))
    name = shards.working_pod(later)
    goes_on.set()
    assert "a later try of this task has Job" in str(earlier.failure())
    assert shards.pod() == name
    later.wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()


@in_worker
def test_a_try_that_is_told_to_stop_leaves_the_job_to_a_later_one(shards: Shards) -> None:
    """Whatever Airflow says of the task: the Job has the later one's id."""
    earlier, name = shards.at_work(TaskInstance(max_tries=0))
    shards.cluster.agent.freeze(name)
    later = TaskRun(shards.task, TaskInstance(try_number=2), "deferred")
    shards.runs.append(later)
    shards.wait(lambda: later.is_deferred, "the trigger")
    earlier.kill("failed")
    earlier.failure()
    assert shards.pod() == name
    shards.cluster.agent.thaw(name)
    later.wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()
