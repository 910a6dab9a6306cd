"""Shards generated in the pods of a Job: the real operator, against a cluster's API."""

import re
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from support.kubernetes.cluster import python_image
from support.kubernetes.pod_worker import Image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance

_WITH_QUICK_LINES = """
import sys
from batchllm_operator import cli, progress

progress.LINE_INTERVAL_S = 0.1
sys.exit(cli.main(sys.argv[1:]))
"""


def seen(shards: Shards, capfd: pytest.CaptureFixture[str], pattern: str) -> str:
    """Wait until the log has a text that matches, and return the log until then."""
    log = ""

    def is_there() -> bool:
        nonlocal log
        log += "".join(capfd.readouterr())
        return re.search(pattern, log) is not None

    shards.wait(is_there, pattern)
    return log


def test_a_shard_is_generated_in_a_pod(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan(delay_s=0.03)
    run = shards.start()
    pod = shards.cluster.pod(shards.pod())
    assert [each.name for each in pod.spec.containers] == ["base"]  # no sidecar
    result = run.wait()
    assert result["num_rows"] == NUM_ROWS
    assert result["plan_uri"] == shards.plan_uri
    assert all(isinstance(value, str | int | float) for value in result.values())
    shards.check_whole()
    assert "1 of 1 worker run" in "".join(capfd.readouterr())


@in_triggerer
def test_progress_is_in_the_log_while_the_job_runs(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    shards.plan(delay_s=0.1)
    command = [sys.executable, "-P", "-c", _WITH_QUICK_LINES, "run", "--plan", shards.plan_uri]
    shards.cluster.agent.add_image("job:1", replace(python_image(), command=command))
    run = shards.start()
    seen(shards, capfd, r"1 of 1 worker run; worker 0: \d+/30 rows .* tokens/s, .* ETA")
    run.wait()


@in_triggerer
def test_a_finished_shard_needs_no_job(shards: Shards) -> None:
    shards.plan()
    first = shards.start().wait()
    shards.cluster.agent.hold_scheduling()  # a pod would wait for ever
    assert shards.start(TaskInstance(try_number=2)).wait() == first


@in_worker
def test_a_pod_that_vanished_after_finishing_is_a_success(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.vanish_after_finish()
    assert shards.start().wait()["num_rows"] == NUM_ROWS
    shards.check_whole()


@in_triggerer
def test_a_job_that_ended_well_without_results_is_a_failure(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.add_image("job:1", Image(command=["echo", "all is well"]))
    error = shards.start().failure()
    assert isinstance(error, AirflowException) and not isinstance(error, AirflowFailException)
    assert "ended well, but its results aren't in the lake" in str(error)
    assert "0 of 1 shard finished" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_an_exit_code_that_no_retry_mends_ends_the_job_and_the_task(shards: Shards) -> None:
    """Though each worker might restart a few times."""
    shards.plan(model={"path": "no-model"})
    (Path(shards.plan_uri) / "shard-00000.parquet").unlink()
    error = shards.start(max_restarts=5, num_workers=2).failure()
    assert isinstance(error, AirflowFailException)  # the plan is broken: no retry
    assert "failed with exit code 2; it said: plan " in str(error)
    assert "shard-00000.parquet is missing" in str(error)
    shards.check_nothing_left()


def test_an_evicted_pod_is_replaced_and_goes_on(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    before = shards.wait_for_parts(2)
    shards.cluster.agent.evict(name)
    run.wait()
    assert before.items() <= shards.parts().items()  # not generated again
    assert shards.report()["num_resumed_parts"] >= 2
    shards.check_whole()


@in_triggerer
def test_a_worker_that_fails_by_itself_starts_again_a_few_times(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start(max_restarts=1)
    name = shards.pod()
    before = shards.wait_for_parts(1)
    shards.cluster.agent.oom_kill(name)
    run.wait()
    assert before.items() <= shards.parts().items()
    shards.check_whole()


@in_triggerer
def test_the_last_lines_of_a_failed_pod_are_logged_where_they_stay(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the triggerer, and in the worker, because the triggerer's file is emptied."""
    shards.plan()
    command = ["sh", "-c", "echo before the end; exit 1"]
    shards.cluster.agent.add_image("job:1", Image(command=command))
    shards.start().failure()
    log = "".join(capfd.readouterr())
    assert len(re.findall(r"  before the end", log)) == 2


@in_triggerer
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("oom", "OOMKilled.*raise the operator's memory"),
        ("disk", 'its own use of disk: raise the limit.*volume "scratch" exceeds the limit "2Mi"'),
    ],
)
def test_what_a_pod_lacks_is_named_and_a_retry_goes_on(shards: Shards, how: str, said: str) -> None:
    shards.plan(delay_s=1.0 if shards.cluster.backend.has_nodes else 0.05)
    template = shards.pod_arguments()["pod_template_dict"]
    scratch = {"name": "scratch", "emptyDir": {"sizeLimit": "2Mi"}}
    template["spec"]["volumes"].append(scratch)
    run = shards.start(pod_template_dict=template)
    name = shards.pod()
    before = shards.wait_for_parts(1)
    if how == "oom":
        shards.cluster.agent.oom_kill(name)
    else:
        shards.cluster.agent.evict_for_own_disk(name, "scratch", "2Mi")
    error = run.failure()
    assert re.search(said, str(error))
    assert not isinstance(error, AirflowFailException)
    shards.check_nothing_left()
    shards.start(TaskInstance(try_number=2)).wait()
    assert before.items() <= shards.parts().items()
    shards.check_whole()


@in_triggerer
def test_an_image_that_cannot_be_pulled(shards: Shards) -> None:
    shards.plan()
    error = shards.start(image="job:2", stuck_timeout=timedelta(seconds=0.3)).failure()
    assert "can't start (" in str(error) and "job:2" in str(error)
    assert not isinstance(error, AirflowFailException)  # a registry may come back
    shards.check_nothing_left()


@in_triggerer
def test_it_waits_for_a_gpu(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan()
    run = shards.start(gpu="nvidia", gpu_count=2, node_selector={"kubernetes.io/os": "linux"})
    seen(shards, capfd, "0 of 1 worker run; waiting: .*Insufficient nvidia.com/gpu")
    assert run.error is None and run.result is None
    shards.cluster.agent.set_capacity({"nvidia.com/gpu": "2"})
    run.wait()
    shards.check_whole()


@in_worker
def test_it_waits_for_room_in_a_quota(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan()
    shards.cluster.set_quota({"pods": "0"})
    run = shards.start()
    seen(shards, capfd, "waiting: .*exceeded quota")
    shards.cluster.api.delete_namespaced_resource_quota("quota", shards.cluster.namespace)
    run.wait()
    shards.check_whole()


@in_triggerer
def test_it_waits_until_its_queue_admits_it(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    shards.plan()
    run = shards.start(queue_name="gpus", num_workers=2, min_workers=1)
    seen(shards, capfd, "waiting: it is suspended until its queue admits it")
    job = shards.job()
    assert job.metadata.labels["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job.metadata.annotations["kueue.x-k8s.io/job-min-parallelism"] == "1"
    assert shards.cluster.pods() == []
    admitted = {"spec": {"suspend": False}}
    shards.cluster.batch.patch_namespaced_job(job.metadata.name, job.metadata.namespace, admitted)
    run.wait()
    shards.check_whole()


@in_triggerer
def test_a_job_that_the_cluster_refuses_is_not_tried_again(shards: Shards) -> None:
    shards.plan()
    error = shards.start(memory="much").failure()
    assert isinstance(error, AirflowFailException)
    assert "the cluster refuses the Job or its Secret: 4" in str(error)
    missing = shards.start(namespace="no-such-namespace").failure()
    assert isinstance(missing, AirflowFailException)
    assert 'namespaces "no-such-namespace" not found' in str(missing)
    shards.cluster.proxy.deny("create", "jobs")
    forbidden = shards.start().failure()
    assert isinstance(forbidden, AirflowFailException)
    assert "the cluster refuses the Job or its Secret: 403" in str(forbidden)


@in_triggerer
def test_an_api_server_that_stays_away_fails_the_try_and_the_next_adopts_the_job(
    shards: Shards,
) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start(api_timeout=timedelta(seconds=0.5))
    name = shards.pod()
    shards.wait(lambda: run.is_deferred, "the trigger")
    shards.cluster.agent.freeze(name)  # or it may have ended by then
    shards.cluster.proxy.down()
    assert "the next try looks for it" in str(run.failure())
    shards.cluster.proxy.up()
    assert shards.pod() == name
    check_adopted(shards, name)


def check_adopted(shards: Shards, pod: str, **arguments: Any) -> None:
    """The next try adopts the Job of a frozen pod, which then does all of the work."""
    run = shards.start(TaskInstance(try_number=2), **arguments)
    shards.wait_until_watched(run)  # or the pod would have ended before it is found
    shards.cluster.agent.thaw(pod)
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # one pod did it all
    shards.check_whole()
