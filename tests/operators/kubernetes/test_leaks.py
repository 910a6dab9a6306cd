"""What could leave a Job, a Secret or a wrong success behind, and doesn't."""

import asyncio
import json
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import TaskDeferred
from support.kubernetes.pod_worker import Image
from support.pod_shards import Shards, in_triggerer
from support.task_runs import TaskInstance, TaskRun


@in_triggerer
def test_a_refused_secret_leaves_no_job(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart's default Role has no right to Secrets; the failure is final, so nobody comes."""
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": "canary-secret"}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.cluster.proxy.deny("create", "secrets")
    shards.plan()
    shards.start(lake_conn_id="lake").failure()
    shards.check_nothing_left()


@in_triggerer
def test_what_a_pod_says_of_its_secret_is_masked_in_the_event(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is stored in Airflow's database; a child process's lines are masked."""
    key = "canary-secret-key"
    lake = {"conn_type": "aws", "login": "AKIACANARY", "password": key}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    shards.plan()
    command = ["sh", "-c", "echo bad signature for $AWS_SECRET_ACCESS_KEY >&2; exit 1"]
    shards.cluster.agent.add_image("job:1", Image(command=command))
    task = shards.task(lake_conn_id="lake")
    run = TaskRun.__new__(TaskRun)
    run.ti = TaskInstance()
    execute = getattr(type(task).execute, "__wrapped__", type(task).execute)
    with pytest.raises(TaskDeferred) as deferral:
        execute(task, run.context)

    async def first() -> Any:
        async for event in deferral.value.trigger.run():
            return event.payload

    event = asyncio.run(first())
    task._release(run.context)
    assert key not in json.dumps(event), event
