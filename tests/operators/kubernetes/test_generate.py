"""Shards generated in pods: the real operator and provider, against a cluster's API."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from support.fork_server import ForkServer
from support.kubernetes.cluster import python_image
from support.kubernetes.images import Image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance

from batchllm_operator.operators import metrics


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was counted of pods, in order."""
    names: list[str] = []

    class Stats:
        @staticmethod
        def incr(stat: str, count: int, *, tags: dict[str, str]) -> None:
            if stat.startswith("batchllm.pods."):
                assert (count, tags) == (1, {"stage": "run", "job": "job", "dag_id": "job"})
                names.append(stat)

        @staticmethod
        def timing(stat: str, dt: Any, *, tags: dict[str, str]) -> None:
            """Not of pods."""

    monkeypatch.setattr(metrics, "Stats", Stats)
    return names


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
    assert "worker 0: 30 rows" in log  # the pod's own lines
    assert re.search(
        r"worker 0: 30/30 rows .* rows/s, .* tokens/s, \d+ % of prompt tokens saved, took", log
    )
    assert "being deleted" not in log


@in_worker
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
        return (
            re.search(r"worker 0: \d+/30 rows .* tokens/s, \d+ % of prompt tokens saved, ETA", seen)
            is not None
        )

    shards.wait(has_eta, "a line with an ETA")
    assert run.error is None and run.result is None  # it still runs
    run.wait()
    lines = (seen + "".join(capfd.readouterr())).splitlines()
    progress = [re.search(r"worker 0: (\d+)/30 rows .* ETA", line) for line in lines]
    told = [int(match[1]) for match in progress if match]
    assert told == sorted(set(told)), "a line was passed on twice, or out of order"
    assert len(told) > 3


@in_triggerer
def test_a_finished_shard_needs_no_pod(shards: Shards) -> None:
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
def test_a_pod_that_ended_well_without_a_report_is_a_failure(shards: Shards) -> None:
    shards.plan()
    shards.cluster.agent.add_image("job:1", Image(replaced_command=["echo", "all is well"]))
    error = shards.start().failure()
    assert isinstance(error, AirflowException) and not isinstance(error, AirflowFailException)
    assert "ended well, but its results aren't in the lake" in str(error)
    assert "0 of 1 shard finished" in str(error)
    shards.check_nothing_left()


@in_triggerer
def test_a_failure_tells_what_the_command_said(shards: Shards) -> None:
    shards.plan(model={"path": "no-model"})
    (Path(shards.plan_uri) / "shard-00000.parquet").unlink()
    error = shards.start().failure()
    assert isinstance(error, AirflowFailException)  # the plan is broken: no retry
    assert "failed with exit code 2; it said: plan " in str(error)
    assert "shard-00000.parquet is missing" in str(error)
    shards.check_nothing_left()


def test_a_pod_is_evicted_and_another_goes_on(shards: Shards, counted: list[str]) -> None:
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    before = shards.wait_for_parts(2)
    shards.cluster.agent.evict(name)
    run.wait()
    assert before.items() <= shards.parts().items()  # not generated again
    assert shards.report()["num_resumed_parts"] >= 2
    assert counted == [metrics.PODS_REPLACED]
    shards.check_whole()


@in_triggerer
def test_the_last_lines_of_an_evicted_pod_are_logged_where_they_stay(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    """The triggerer's file is emptied when the task waits for the next pod."""
    shards.plan()
    command = ["sh", "-c", "echo before the eviction; sleep 600"]
    shards.cluster.agent.add_image("job:1", Image(replaced_command=command))
    run = shards.start(max_disruptions=0)
    name = shards.pod()
    seen = ""

    def is_seen() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return "before the eviction" in seen

    shards.wait(is_seen, "the line")
    shards.cluster.agent.evict(name)
    run.failure()
    assert (seen + "".join(capfd.readouterr())).count("before the eviction") == 2


@in_triggerer
def test_a_pod_evicted_for_its_own_disk_use_is_not_replaced(
    shards: Shards, counted: list[str]
) -> None:
    """Another would fetch the model again, and outgrow the same limit."""
    shards.plan(delay_s=0.05)
    run = shards.start()
    name = shards.pod()
    before = shards.wait_for_parts(1)
    shards.cluster.agent.evict_for_own_disk(name, "scratch", "50Gi")
    error = run.failure()
    assert "its own use of disk: raise the limit" in str(error)
    assert 'Usage of EmptyDir volume "scratch" exceeds the limit "50Gi"' in str(error)
    assert not isinstance(error, AirflowFailException)  # finished parts are kept
    assert counted == []
    shards.check_nothing_left()
    assert before.items() <= shards.parts().items()


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


@in_worker
def test_it_waits_for_room_in_a_quota(
    shards: Shards, counted: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
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
    assert counted == [metrics.QUOTA_WAITS]  # however often it was asked for
    shards.check_whole()


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
def test_an_api_server_that_stays_away_fails_the_try_and_the_next_takes_the_pod_up(
    shards: Shards,
) -> None:
    shards.plan(delay_s=0.1)
    run = shards.start(api_timeout=timedelta(seconds=0.5))
    name = shards.pod()
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
