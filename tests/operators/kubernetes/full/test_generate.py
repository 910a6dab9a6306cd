"""Shards generated in pods: the rest of what a cluster may do to them."""

import re
from datetime import timedelta

import pytest
from operators.kubernetes.test_generate import check_adopted
from support.fork_server import ForkServer
from support.kubernetes.cluster import python_image
from support.pod_shards import Shards, in_triggerer, in_worker

from batchllm_operator.operators.jobs import cluster_job


@in_triggerer
def test_preemption_while_running(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    shards.wait_for_parts(1)
    shards.cluster.agent.preempt(name)
    run.wait()
    shards.check_whole()


@in_worker
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
def test_a_lost_node(shards: Shards) -> None:
    """The pod stays `Running` until the cluster gives it up, 404 then."""
    shards.plan(delay_s=0.05)
    agent = shards.cluster.agent
    run = shards.start()
    name = shards.pod()
    shards.wait_for_parts(1)
    agent.lose_node()
    agent.add_node("spare")
    agent.mark_node_unreachable()
    assert shards.cluster.phase(name) == "Running"
    agent.delete_pods_of_lost_node()
    agent.collect_lost_pods()
    run.wait()
    shards.check_whole()


@in_worker
def test_a_lost_node_whose_pods_are_not_collected(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that doesn't come back, and no controller that forces its pods away."""
    monkeypatch.setattr(cluster_job, "ENDING_MARGIN_S", -39.5)  # of a grace period of 40
    shards.plan(delay_s=0.05)
    agent = shards.cluster.agent
    run = shards.start()
    shards.wait_for_parts(1)
    agent.lose_node()
    agent.add_node("spare")
    agent.mark_node_unreachable()
    agent.delete_pods_of_lost_node()
    run.wait()
    shards.check_whole()


@in_worker
def test_a_watcher_that_may_not_read_the_job_says_so(shards: Shards) -> None:
    proxy = shards.cluster.proxy
    shards.plan(delay_s=0.05)
    run = shards.start(api_timeout=timedelta(seconds=0.5))
    name = shards.pod()
    shards.wait_until_watched(run)
    shards.cluster.agent.freeze(name)
    proxy.deny("get", "jobs")
    assert "lacks a right" in str(run.failure())
    proxy.allow_all()
    check_adopted(shards, name)


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
def test_a_secret_that_is_not_there(shards: Shards) -> None:
    shards.plan()
    task = shards.start(secret_names=["absent"], stuck_timeout=timedelta(seconds=0.3))
    assert 'CreateContainerConfigError): secret "absent" not found' in str(task.failure())
    shards.check_nothing_left()


@in_worker
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


@in_triggerer
def test_a_create_whose_answer_was_lost_makes_one_job(shards: Shards) -> None:
    shards.plan(delay_s=0.2)  # its pod still runs when the request is repeated
    shards.cluster.proxy.lose_next_response("create", "jobs")
    run = shards.start()
    run.wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()


@in_triggerer
def test_a_token_that_expired_is_read_again(shards: Shards) -> None:
    proxy = shards.cluster.proxy
    shards.plan(delay_s=0.1)
    run = shards.start()
    shards.pod()
    token = proxy.token = "a-new-token"
    before = len(shards.parts())
    shards.wait_for_parts(before + 1)
    path = shards.cluster.kubeconfig
    path.write_text(re.sub(r"token: .*", f"token: {token}", path.read_text()))
    run.wait()
    shards.check_whole()
