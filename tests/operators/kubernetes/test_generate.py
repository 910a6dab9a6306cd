"""Shards generated in pods: the real operator and provider, against a cluster's API."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from support.fork_server import ForkServer
from support.health import api_server, health
from support.kubernetes.cluster import python_image
from support.kubernetes.images import Image
from support.kubernetes.node import NodeSettings
from support.pod_shards import NUM_ROWS, Shards, in_triggerer
from support.task_runs import TaskInstance

from batchllm_operator.operators import triggerer


def test_a_shard_is_generated_in_a_pod(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan()
    run = shards.start()
    pod = shards.cluster.pod(shards.pod())
    assert [each.name for each in pod.spec.containers] == ["base"]  # no sidecar
    result = run.wait()
    assert result["num_rows"] == NUM_ROWS
    assert result["plan_uri"] == shards.plan_uri
    assert all(isinstance(value, str | int | float) for value in result.values())
    shards.check_whole()
    log = "".join(capfd.readouterr())
    assert "shard 0: 30 rows" in log  # the pod's own lines
    assert re.search(r"shard 0: 30/30 rows .* rows/s, .* tokens/s, \d+ % saved, took", log)
    assert "being deleted" not in log


def test_progress_is_in_the_log_while_the_pod_runs(
    shards: Shards, commands: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    shards.plan(delay_s=0.05)
    image = python_image(commands, BATCHLLM_PROGRESS_INTERVAL_S="0.1")
    shards.cluster.agent.add_image("job:1", image)
    run = shards.start()
    seen = ""

    def has_eta() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return re.search(r"shard 0: \d+/30 rows .* tokens/s, \d+ % saved, ETA", seen) is not None

    shards.wait(has_eta, "a line with an ETA")
    assert run.error is None and run.result is None  # it still runs
    run.wait()
    lines = (seen + "".join(capfd.readouterr())).splitlines()
    progress = [re.search(r"shard 0: (\d+)/30 rows .* ETA", line) for line in lines]
    told = [int(match[1]) for match in progress if match]
    assert told == sorted(set(told)), "a line was passed on twice, or out of order"
    assert len(told) > 3


@in_triggerer
def test_a_worker_hands_over_as_soon_as_a_triggerer_runs(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triggerer, "_ASK_EVERY_S", 0.1)
    shards.plan(delay_s=0.05)
    with api_server([b"busy"]) as server:
        monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", f"{server.url}/execution/")
        run = shards.start(deferrable=None)
        shards.wait_for_parts(1)
        assert run.num_deferrals == 0
        server.answers.append(health("healthy"))
        assert run.wait()["num_rows"] == NUM_ROWS
    assert run.num_deferrals == 1
    assert "Can't tell whether a triggerer runs" in "".join(capfd.readouterr())
    shards.check_whole()


@in_triggerer
def test_a_finished_shard_needs_no_pod(shards: Shards) -> None:
    shards.plan()
    first = shards.start().wait()
    shards.cluster.agent.hold_scheduling()  # a pod would wait for ever
    assert shards.start(TaskInstance(try_number=2)).wait() == first


def test_a_pod_that_vanished_after_finishing_is_a_success(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.vanish_after_finish()
    assert shards.start().wait()["num_rows"] == NUM_ROWS
    shards.check_whole()


@pytest.mark.parametrize("command", [["true"], ["sh", "-c", "echo all is well; exit 0"]])
@in_triggerer
def test_a_pod_that_ended_well_without_a_report_is_a_failure(
    shards: Shards, command: list[str]
) -> None:
    shards.plan()
    shards.cluster.agent.add_image("job:1", Image(replaced_command=command))
    error = shards.start().failure()
    assert isinstance(error, AirflowException) and not isinstance(error, AirflowFailException)
    assert "ended well, but its results aren't in the lake" in str(error)
    assert "there is no report" in str(error)
    shards.check_nothing_left()


def test_a_failure_tells_what_the_command_said(shards: Shards) -> None:
    shards.plan(model={"path": "no-model"})
    (Path(shards.plan_uri) / "shard-00000.parquet").unlink()
    error = shards.start().failure()
    assert isinstance(error, AirflowFailException)  # the plan is broken: no retry
    assert "failed with exit code 2; it said: plan " in str(error)
    assert "shard-00000.parquet is missing" in str(error)
    shards.check_nothing_left()


def test_a_pod_is_evicted_and_another_goes_on(shards: Shards) -> None:
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
def test_preemption_while_running(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    shards.wait_for_parts(1)
    shards.cluster.agent.preempt(name)
    run.wait()
    shards.check_whole()


def test_preemption_before_the_start(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.hold_images("job:1")
    run = shards.start()
    shards.wait(shards.live, "a pod")
    (pod,) = shards.live()
    shards.cluster.agent.preempt(pod.metadata.name)  # it is simply gone: 404
    shards.cluster.wait_for_phase(pod.metadata.name, "Gone")
    shards.cluster.agent.release_images("job:1")
    run.wait()
    shards.check_whole()


@in_triggerer
def test_a_cluster_that_never_lets_it_finish_fails_the_try(shards: Shards) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start(max_disruptions=1)
    name = shards.pod()
    (uid,) = [pod.metadata.uid for pod in shards.live()]
    shards.cluster.agent.evict(name)
    shards.wait(lambda: {pod.metadata.uid for pod in shards.live()} - {uid}, "another pod")
    shards.cluster.agent.evict(shards.pod())
    error = run.failure()
    assert "ended by the cluster (Evicted)" in str(error)
    assert not isinstance(error, AirflowFailException)
    shards.check_nothing_left()


@in_triggerer
def test_a_lost_node(shards: Shards) -> None:
    """The pod stays `Running` until the cluster gives it up, 404 then."""
    shards.plan(delay_s=0.05)
    agent = shards.cluster.agent
    run = shards.start()
    name = shards.pod()
    shards.wait_for_parts(1)
    agent.lose_node()
    agent.add_node(NodeSettings("spare"))
    agent.mark_node_unreachable()
    assert shards.cluster.phase(name) == "Running"
    agent.delete_pods_of_lost_node()
    agent.collect_lost_pods()
    run.wait()
    shards.check_whole()


def test_a_lost_node_whose_pods_nobody_collects(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that doesn't come back, and no controller that forces its pods away."""
    for module in ("watch", "attempt"):
        monkeypatch.setattr(f"batchllm_operator.operators.pods.{module}.ENDING_MARGIN_S", 0.5)
    shards.plan(delay_s=0.05)
    agent = shards.cluster.agent
    run = shards.start()
    name = shards.pod()
    shards.wait_for_parts(1)
    agent.lose_node()
    agent.add_node(NodeSettings("spare"))
    agent.mark_node_unreachable()
    shards.cluster.api.delete_namespaced_pod(name, shards.cluster.namespace, grace_period_seconds=1)
    run.wait()
    shards.check_whole()


def test_a_pod_on_a_lost_node_does_not_keep_the_next_try_waiting(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.operators.pods.attempt.ENDING_MARGIN_S", 0.5)
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    if shards.mode == "deferred":
        shards.wait(lambda: run.is_deferred, "the trigger")
    run.kill("running")  # the worker goes, or the triggerer, and the next try will look
    run.join()
    agent = shards.cluster.agent
    agent.lose_node()
    agent.add_node(NodeSettings("spare"))
    agent.mark_node_unreachable()
    shards.cluster.api.delete_namespaced_pod(name, shards.cluster.namespace, grace_period_seconds=1)
    shards.start(TaskInstance(try_number=2)).wait()
    shards.check_whole()


def test_a_watcher_that_may_not_read_pods_says_so(shards: Shards) -> None:
    double = shards.cluster.double
    shards.plan(delay_s=0.05)
    run = shards.start(api_timeout=timedelta(seconds=0.5))
    name = shards.pod()
    if shards.mode == "deferred":
        shards.wait(lambda: run.is_deferred, "the trigger")
    shards.cluster.agent.freeze(name)
    double.deny("get", "pods")
    assert "may not read pods" in str(run.failure())
    double.allow_all()
    run = shards.start(TaskInstance(try_number=2))
    shards.wait_until_watched(run)  # or the pod would have ended before it is found
    shards.cluster.agent.thaw(name)
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # the same pod did it all
    shards.check_whole()


@in_triggerer
def test_running_out_of_memory_says_so_and_a_retry_goes_on(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    before = shards.wait_for_parts(1)
    shards.cluster.agent.oom_kill(name)
    error = run.failure()
    assert "OOMKilled" in str(error) and "raise the operator's memory" in str(error)
    assert not isinstance(error, AirflowFailException)
    shards.check_nothing_left()
    shards.start(TaskInstance(try_number=2)).wait()
    assert before.items() <= shards.parts().items()
    shards.check_whole()


@pytest.mark.parametrize("image", ["no-such:1", "job:2"])
@in_triggerer
def test_an_image_that_cannot_be_pulled(shards: Shards, image: str) -> None:
    shards.plan()
    error = shards.start(image=image, stuck_timeout=timedelta(seconds=0.3)).failure()
    assert "can't start (" in str(error) and image in str(error)
    assert not isinstance(error, AirflowFailException)  # a registry may come back
    shards.check_nothing_left()


@in_triggerer
def test_an_image_that_is_pushed_in_time(shards: Shards, commands: ForkServer) -> None:
    shards.plan()
    run = shards.start(image="late:1")
    shards.wait(shards.live, "a pod")
    (pod,) = shards.live()
    shards.wait(lambda: shards.cluster.waiting_reason(pod.metadata.name), "it to fail")
    shards.cluster.agent.add_image("late:1", python_image(commands))
    run.wait()
    shards.check_whole()


@in_triggerer
def test_an_image_name_that_is_none_is_not_tried_again(shards: Shards) -> None:
    shards.plan()
    error = shards.start(image="Not An Image").failure()
    assert isinstance(error, AirflowFailException) and "InvalidImageName" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_a_secret_that_is_not_there(shards: Shards) -> None:
    shards.plan()
    task = shards.start(secret_names=["absent"], stuck_timeout=timedelta(seconds=0.3))
    assert 'CreateContainerConfigError): secret "absent" not found' in str(task.failure())
    shards.check_nothing_left()


@in_triggerer
def test_a_container_that_does_not_come_up(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.hold_images("job:1")
    error = shards.start(start_timeout=timedelta(seconds=0.3)).failure()
    assert "didn't start in time (start_timeout)" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_it_waits_for_a_gpu(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan()
    run = shards.start(gpu="nvidia", gpu_count=2, node_selector={"kubernetes.io/os": "linux"})
    seen = ""

    def is_told() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return "Insufficient nvidia.com/gpu" in seen

    shards.wait(is_told, "the reason")
    assert run.error is None and run.result is None
    shards.cluster.agent.set_capacity({"nvidia.com/gpu": "2"})
    run.wait()
    shards.check_whole()


@in_triggerer
def test_it_waits_for_a_gpu_no_longer_than_allowed(shards: Shards) -> None:
    shards.plan()
    error = shards.start(
        gpu="nvidia",
        node_selector={"kubernetes.io/os": "linux"},
        queue_timeout=timedelta(seconds=0.5),
    ).failure()
    assert "found no node in time (queue_timeout)" in str(error)
    assert "Insufficient nvidia.com/gpu" in str(error)
    shards.check_nothing_left()


def test_it_waits_for_room_in_a_quota(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan()
    shards.cluster.set_quota({"pods": "0"})
    run = shards.start()
    seen = ""

    def is_told() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return "Waiting for room in the namespace's quota" in seen and "exceeded quota" in seen

    shards.wait(is_told, "the reason")
    shards.cluster.api.delete_namespaced_resource_quota("quota", shards.cluster.namespace)
    run.wait()
    shards.check_whole()


@in_triggerer
def test_a_quota_that_stays_full(shards: Shards) -> None:
    shards.plan()
    shards.cluster.set_quota({"pods": "0"})
    error = shards.start(queue_timeout=timedelta(seconds=0.3)).failure()
    assert "no room for a pod in time (queue_timeout)" in str(error)
    assert "exceeded quota: quota" in str(error)


@in_triggerer
def test_a_pod_that_the_cluster_refuses_is_not_tried_again(shards: Shards) -> None:
    shards.plan()
    error = shards.start(memory="much").failure()
    assert isinstance(error, AirflowFailException)
    assert "the cluster refuses the pod: 4" in str(error)
    missing = shards.start(namespace="no-such-namespace").failure()
    assert isinstance(missing, AirflowFailException)
    assert 'namespaces "no-such-namespace" not found' in str(missing)
    shards.cluster.double.deny("create", "pods")
    forbidden = shards.start().failure()
    assert isinstance(forbidden, AirflowFailException)
    assert "the cluster refuses the pod: 403" in str(forbidden)


@in_triggerer
def test_a_deadline_ends_what_nobody_ends(shards: Shards) -> None:
    shards.plan(delay_s=1.0)
    error = shards.start(active_deadline_seconds=1).failure()
    assert "ran longer than active_deadline_seconds" in str(error)
    shards.check_nothing_left()


def test_restarts_of_the_api_server_go_unnoticed(shards: Shards) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start()
    name = shards.pod()
    for _ in range(2):
        shards.cluster.proxy.down()
        before = len(shards.parts())
        shards.wait_for_parts(before + 1)  # the pod doesn't care
        shards.cluster.proxy.up()
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0  # it was one pod
    assert name
    shards.check_whole()


def test_an_api_server_that_stays_away_fails_the_try_and_the_next_takes_the_pod_up(
    shards: Shards,
) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start(api_timeout=timedelta(seconds=0.5))
    name = shards.pod()
    if shards.mode == "deferred":
        shards.wait(lambda: run.is_deferred, "the trigger")
    shards.cluster.agent.freeze(name)  # or it may have ended by then
    shards.cluster.proxy.down()
    error = run.failure()
    assert "the next try looks for it" in str(error)
    shards.cluster.proxy.up()
    assert shards.pod() == name
    run = shards.start(TaskInstance(try_number=2))
    shards.wait_until_watched(run)  # or the pod would have ended before it is found
    shards.cluster.agent.thaw(name)
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()


@in_triggerer
def test_a_create_whose_answer_was_lost_makes_one_pod(shards: Shards) -> None:
    shards.plan()
    shards.cluster.proxy.lose_next_response("POST")
    run = shards.start()
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()


@in_triggerer
def test_a_token_that_expired_is_read_again(shards: Shards) -> None:
    double = shards.cluster.double
    shards.plan(delay_s=0.1)
    run = shards.start()
    shards.pod()
    token = double.access.user_token = "a-new-token"
    before = len(shards.parts())
    shards.wait_for_parts(before + 1)
    path = shards.cluster.kubeconfig
    path.write_text(re.sub(r"token: .*", f"token: {token}", path.read_text()))
    run.wait()
    shards.check_whole()
