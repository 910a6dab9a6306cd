"""What else could leave a Job, a Secret or a wrong success behind, and doesn't."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowException, TaskDeferred
from support.fake_job import DS, document_rows, write_job, write_table
from support.kubernetes.pod_worker import Image
from support.pod_shards import NUM_ROWS, Shards, in_triggerer, in_worker
from support.task_runs import TaskInstance, TaskRun

from batchllm_operator.operators import BatchLLMPlanOperator
from batchllm_operator.operators.jobs import calls
from batchllm_operator.operators.jobs.end import EndKind


@in_triggerer
def test_a_task_marked_after_its_trigger_fired_leaves_no_job(shards: Shards) -> None:
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
            await trigger.cleanup()
            return event.payload

    event = asyncio.run(life())
    assert event["kind"] == EndKind.LATE
    shards.check_nothing_left()


@in_triggerer
def test_a_run_that_is_made_anew_does_not_take_the_record_of_the_old_one(shards: Shards) -> None:
    """Deleting a DAG run and making it again gives the same run id and try: the same names."""
    write_table(shards.lake / "documents", document_rows())
    spec = write_job(shards.lake, shards.lake)

    def make() -> BatchLLMPlanOperator:
        arguments = shards.pod_arguments()
        return BatchLLMPlanOperator(task_id="plan", spec_path=str(spec), ds=DS, **arguments)

    TaskRun(make, TaskInstance(task_id="plan"), shards.mode).wait()
    (shards.lake / "documents").rename(shards.lake / "gone")  # the input isn't what it was
    shards.cluster.agent.add_image("job:1", Image(command=["sh", "-c", "exit 1"]))
    error = TaskRun(make, TaskInstance(task_id="plan"), shards.mode)
    assert isinstance(error.failure(), AirflowException)


@in_worker
def test_a_role_without_logs_does_not_flood_the_task_log(
    shards: Shards, capfd: pytest.CaptureFixture[str]
) -> None:
    shards.cluster.proxy.deny("get", "pods/log")
    shards.plan(delay_s=0.02)
    shards.start().wait()
    text = "".join(capfd.readouterr())
    assert '"kind"' not in text, text[-600:]


@in_worker
def test_results_count_whatever_the_cluster_is_asked_with(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole in the lake is a success, though nobody can tidy up."""
    shards.plan()
    shards.start().wait()

    def broken(*_: object) -> None:
        raise yaml.parser.ParserError("a kubeconfig that is being written")

    monkeypatch.setattr(calls, "_hook", broken)
    again = shards.start(TaskInstance(try_number=2), api_timeout=timedelta(seconds=0.5))
    assert again.wait()["num_rows"] == NUM_ROWS


@in_triggerer
def test_a_kept_job_that_has_failed_is_not_taken_for_the_next_one(shards: Shards) -> None:
    """`keep_pod`, and a DAG run that was deleted and made again: the same names."""
    shards.plan()
    shards.cluster.agent.add_image("bad:1", Image(command=["false"]))
    shards.start(image="bad:1", on_finish_action="keep_pod").failure()
    assert "Failed" in {condition.type for condition in shards.job().status.conditions}
    assert shards.start().wait()["num_rows"] == NUM_ROWS
    shards.check_nothing_left()


@in_triggerer
def test_a_kept_job_keeps_no_credentials(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": "canary-secret-key"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.plan()
    shards.start(lake_conn_id="lake", on_finish_action="keep_pod").wait()
    secrets = shards.cluster.api.list_namespaced_secret(shards.cluster.namespace).items
    assert [s.metadata.name for s in secrets if s.metadata.name.startswith("batchllm")] == []
    assert "Complete" in {condition.type for condition in shards.job().status.conditions}
