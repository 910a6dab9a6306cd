"""Tasks that are killed, cleared or abandoned, and the tries that follow them."""

from operators.kubernetes.test_generate import check_adopted
from support.pod_shards import Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance


@in_triggerer
def test_a_task_that_the_user_marks_leaves_no_job(shards: Shards) -> None:
    run, _ = shards.at_work()
    run.kill("failed")
    assert run.failure() is not None
    shards.check_nothing_left()
    before = shards.parts()
    shards.start(TaskInstance(try_number=2)).wait()
    assert before.items() <= shards.parts().items()
    shards.check_whole()


@in_worker
def test_the_end_of_a_worker_leaves_the_job_to_the_next_try(shards: Shards) -> None:
    run, name = shards.at_work()
    shards.cluster.agent.freeze(name)
    run.kill("running")  # SIGTERM, while the task's state stays as it is
    assert "the task was killed" in str(run.failure())
    assert shards.pod() == name
    check_adopted(shards, name)
