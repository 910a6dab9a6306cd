"""What else could leave a pod, a Secret or a wrong success behind, and doesn't."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from datetime import timedelta
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowException, TaskDeferred
from support.fake_job import DS, document_rows, job_fields, write_table
from support.kubernetes.images import Image
from support.kubernetes.status import ApiError
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators import BatchLLMGenerateOperator, BatchLLMPlanOperator
from batchllm_operator.operators.pods.end import EndKind


@in_triggerer
def test_a_task_marked_after_its_trigger_fired_leaves_no_pod(shards: Shards) -> None:
    """Fired, and waiting for a slot of the pool: no process learns of the mark."""
    shards.plan()
    shards.cluster.agent.hold_scheduling()
    task = shards.task(queue_timeout=timedelta(seconds=0.3))
    ti = TaskInstance()
    run = TaskRun.__new__(TaskRun)
    run.ti = ti
    execute = getattr(type(task).execute, "__wrapped__", type(task).execute)
    with pytest.raises(TaskDeferred) as deferral:
        execute(task, run.context)
    trigger: Any = deferral.value.trigger
    ti.state = "failed"

    async def life() -> Any:
        async def state() -> str | None:
            return ti.state

        trigger.get_task_state = state
        async for event in trigger.run():
            await trigger.on_kill()
            await trigger.cleanup()
            return event.payload

    event = asyncio.run(life())
    assert event["kind"] == EndKind.QUEUE_LIMIT
    try:
        assert [pod.metadata.name for pod in shards.live()] == []
    finally:
        shards.cluster.agent.release_scheduling()
        for pod in shards.cluster.pods():
            shards.cluster.api.delete_namespaced_pod(
                pod.metadata.name, shards.cluster.namespace, grace_period_seconds=0
            )


@in_worker
def test_a_kill_between_a_disruption_and_the_removal_counts(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_ending` forgets a kill that came while `_remove_pod` connected."""
    shards.plan(delay_s=0.2)
    run = shards.start()
    name = shards.pod()
    task = run.task
    original = task._remove_pod
    done: list[Any] = []

    def remove(*args: Any, **options: Any) -> None:
        pods = task._pods

        def connect(*a: Any, **o: Any) -> Any:
            made = pods(*a, **o)
            if not done:
                done.append(1)
                run.ti.state = "failed"
                task.on_kill()  # as from Airflow's signal handler
            return made

        monkeypatch.setattr(task, "_pods", connect)
        original(*args, **options)

    monkeypatch.setattr(task, "_remove_pod", remove)
    shards.cluster.agent.evict(name)
    assert "was killed" in str(run.failure())  # else another pod would have finished the shard
    shards.check_nothing_left()


@in_worker
def test_a_kept_pod_with_a_sidecar_does_not_keep_its_gpu(shards: Shards) -> None:
    """The main container has ended, the pod hasn't: `keep_pod` leaves it running."""
    shards.plan()
    side = {"name": "side", "image": "job:1", "command": ["sleep", "60"]}
    given = shards.pod_arguments()["pod_template_dict"]
    given["spec"]["containers"].append(side)
    shards.start(on_finish_action="keep_pod", pod_template_dict=given).wait()
    shards.check_nothing_left()


@in_triggerer
def test_a_run_that_is_made_anew_does_not_take_the_record_of_the_old_one(shards: Shards) -> None:
    """Deleting a DAG run and making it again gives the same run id and try: the same names."""
    write_table(shards.lake / "documents", document_rows())
    spec = shards.lake / "job.yaml"
    spec.write_text(yaml.safe_dump(job_fields(str(shards.lake))))

    def make() -> BatchLLMPlanOperator:
        arguments = shards.pod_arguments()
        return BatchLLMPlanOperator(task_id="plan", spec_path=str(spec), ds=DS, **arguments)

    TaskRun(make, TaskInstance(task_id="plan"), shards.mode).wait()
    (shards.lake / "documents").rename(shards.lake / "gone")  # the input isn't what it was
    shards.cluster.agent.add_image("job:1", Image(replaced_command=["sh", "-c", "exit 1"]))
    error = TaskRun(make, TaskInstance(task_id="plan"), shards.mode)
    assert isinstance(error.failure(), AirflowException)


@in_triggerer
def test_a_kept_dead_pod_of_the_same_name_is_not_taken_for_the_new_one(shards: Shards) -> None:
    """keep_pod, and a DAG run that was deleted and made again: 409, and a corpse is `Made`."""
    shards.plan()
    shards.cluster.agent.add_image("bad:1", Image(replaced_command=["false"]))
    shards.start(image="bad:1", on_finish_action="keep_pod").failure()
    try:
        result = shards.start(on_finish_action="keep_pod").wait()
        assert result["num_rows"] == 30
    finally:
        for pod in shards.cluster.pods():
            shards.cluster.api.delete_namespaced_pod(pod.metadata.name, shards.cluster.namespace)


@in_worker
def test_a_role_without_logs_does_not_flood_the_task_log(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    shards.cluster.double.deny("get", "pods/log")
    shards.plan(delay_s=0.02)
    shards.start().wait()
    text = "".join(capfd.readouterr())
    assert '"kind"' not in text, text[-600:]


@in_worker
def test_debug_logging_shows_no_secret(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client logs the body of every answer, and base64 isn't masked."""
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": "canary-secret-key"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.plan()
    with caplog.at_level(logging.DEBUG, logger="kubernetes"):
        shards.start(aws_conn_id="lake").wait()
    assert base64.b64encode(b"canary-secret-key").decode() not in caplog.text


@in_triggerer
def test_a_kept_pod_keeps_no_credentials(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": "canary-secret-key"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.plan()
    shards.start(aws_conn_id="lake", on_finish_action="keep_pod").wait()
    namespace = shards.cluster.namespace
    names = [s.metadata.name for s in shards.cluster.api.list_namespaced_secret(namespace).items]
    for pod in shards.cluster.pods():
        shards.cluster.api.delete_namespaced_pod(pod.metadata.name, namespace)
    assert [name for name in names if name.startswith("batchllm")] == []


@in_worker
@pytest.mark.parametrize("action", ["keep_pod", "delete_active_pod"])
def test_a_kept_pod_stays_when_the_next_try_finds_the_results(shards: Shards, action: str) -> None:
    shards.plan()
    shards.start(on_finish_action=action).wait()
    (name,) = [pod.metadata.name for pod in shards.cluster.pods()]
    shards.start(TaskInstance(try_number=2), on_finish_action=action).wait()
    assert [pod.metadata.name for pod in shards.cluster.pods()] == [name]
    shards.cluster.api.delete_namespaced_pod(name, shards.cluster.namespace)


@in_worker
def test_results_count_whatever_the_cluster_is_asked_with(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole in the lake is a success, though nobody can tidy up."""
    shards.plan()
    shards.start().wait()

    def broken(self: object) -> None:
        raise yaml.parser.ParserError("a kubeconfig that is being written")

    monkeypatch.setattr(BatchLLMGenerateOperator, "_connect", broken)
    assert shards.start(TaskInstance(try_number=2)).wait()["num_rows"] == NUM_ROWS


@in_worker
def test_a_quota_for_secrets_is_waited_for(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": "canary-secret-key"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.plan()
    message = 'secrets "s" is forbidden: exceeded quota: q, requested: secrets=1, used: secrets=9'
    shards.cluster.double.fail_next("POST", "secrets", ApiError(403, "Forbidden", message))
    run = shards.start(aws_conn_id="lake")
    seen = ""

    def waits() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return "Waiting for room in the namespace's quota" in seen

    shards.wait(waits, "it to wait")
    run.wait()
    shards.check_whole()
