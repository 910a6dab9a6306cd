"""Credentials go into Secrets that belong to Jobs, and are seen nowhere else."""

import asyncio
import base64
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from helm_chart.rendering import render
from kubernetes.client import ApiClient
from operators.kubernetes.test_cluster_job import body
from support.kubernetes.cluster import Cluster, python_image
from support.kubernetes.objects import ApiError
from support.pod_shards import Shards, in_triggerer
from support.task_runs import TaskInstance
from support.watched_jobs import LATER, watched_job

from batchllm_operator.operators.jobs.cluster_job import ClusterJob

KEY_ID, KEY = "AKIACANARY0KEYID", "canary/secret+key"
TOKEN = "canary-catalog-token"
CANARIES = (KEY_ID, KEY, TOKEN)
ARGUMENTS: dict[str, Any] = {
    "lake_conn_id": "lake",
    "connection_env": {"PYICEBERG_CATALOG__LAKE__TOKEN": "catalog.password"},
}


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = {"conn_type": "aws", "login": KEY_ID, "password": KEY}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(lake))
    catalog = {"conn_type": "generic", "password": TOKEN}
    monkeypatch.setenv("AIRFLOW_CONN_CATALOG", json.dumps(catalog))


@in_triggerer
def test_no_credential_is_seen(shards: Shards, capfd: pytest.CaptureFixture[str]) -> None:
    shards.plan(delay_s=0.05)
    shards.cluster.agent.add_image("job:1", python_image())  # a start from cold, for /proc
    ti = TaskInstance()
    run = shards.start(ti, **ARGUMENTS)
    name, job = shards.pod(), shards.job()
    secret = shards.cluster.api.read_namespaced_secret(job.metadata.name, shards.cluster.namespace)
    held = {key: base64.b64decode(value).decode() for key, value in secret.data.items()}
    assert held == {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "PYICEBERG_CATALOG__LAKE__TOKEN": TOKEN,
    }
    pod = shards.cluster.pod(name)
    (owner,) = secret.metadata.owner_references
    assert (owner.kind, owner.uid) == ("Job", job.metadata.uid)
    pid = shards.cluster.agent.pid(name)
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
    assert all(canary in environment for canary in CANARIES)  # the pod has them

    spec = json.dumps(ApiClient().sanitize_for_serialization([pod, job]))
    events = str(shards.cluster.api.list_namespaced_event(shards.cluster.namespace))
    shards.wait(lambda: run.is_deferred, "the trigger")
    stored = json.dumps(run.trigger.serialize())
    (user,) = yaml.safe_load(shards.cluster.kubeconfig.read_text())["users"]
    assert user["user"] and not any(value in stored for value in user["user"].values())
    result = run.wait()
    log = "".join(capfd.readouterr())
    lake = b"".join(path.read_bytes() for path in shards.lake.rglob("*") if path.is_file())
    for canary in CANARIES:
        assert canary not in spec
        assert canary not in events
        assert canary not in stored
        assert canary not in log
        assert canary not in json.dumps([result, ti.pushed])
        assert canary.encode() not in lake
    shards.check_whole()  # and the Secret went with the Job


@in_triggerer
@pytest.mark.parametrize(
    "arguments",
    [
        {"lake_conn_id": "role"},
        {"connection_env": {"PYICEBERG_CATALOG__LAKE__S3__SESSION_TOKEN": "catalog.password"}},
    ],
)
def test_a_session_token_goes_to_a_pod_only_if_it_is_said_to_last(
    shards: Shards, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"aws_session_token": TOKEN}
    role = {"conn_type": "aws", "login": KEY_ID, "password": KEY, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_ROLE", json.dumps(role))
    shards.plan()
    failure = shards.start(**arguments).failure()
    assert isinstance(failure, AirflowFailException)
    assert "service account" in str(failure) and TOKEN not in str(failure)
    assert shards.jobs() == []
    assert shards.start(session_token_outlives_task=True, **arguments).wait()


@in_triggerer
def test_a_job_that_is_adopted_gets_its_secret_if_it_lacks_it(shards: Shards) -> None:
    """As when the worker died between making the Job and making its Secret."""
    shards.plan(delay_s=0.05)
    shards.cluster.agent.hold_images("job:1")
    run = shards.start(**ARGUMENTS)
    shards.wait(shards.live, "a pod")
    (pod,) = shards.live()
    shards.wait(lambda: run.is_deferred, "the trigger")
    run.kill("running")
    run.join()
    secret, namespace = shards.job().metadata.name, shards.cluster.namespace
    shards.cluster.api.delete_namespaced_secret(secret, namespace)
    shards.cluster.agent.release_images("job:1")
    name = pod.metadata.name
    shards.wait(
        lambda: shards.cluster.waiting_reason(name) == "CreateContainerConfigError", "it to miss it"
    )
    shards.start(TaskInstance(try_number=2), **ARGUMENTS).wait()
    assert shards.report()["num_resumed_parts"] == 0
    shards.check_whole()


def test_a_secret_is_renewed_and_no_value_of_it_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The client logs the body of every answer that it reads, and base64 isn't masked."""
    with caplog.at_level(logging.DEBUG, "kubernetes_asyncio.client.rest"):
        put_secrets(cluster, "first", "second", "third")
    assert '"kind":"Job"' in caplog.text.replace(" ", "")  # a real server writes no spaces
    assert held_secret(cluster) == "third"
    assert base64.b64encode(b"third").decode() not in caplog.text


@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_secret_is_put_again_after_a_passing_error(cluster: Cluster, status: int) -> None:
    """Its answer isn't read, but errors are."""
    cluster.proxy.fail_next("create", "secrets", ApiError(status, "Passing", "try again"))
    put_secrets(cluster, "first")
    assert held_secret(cluster) == "first"


def test_room_for_a_secret_in_a_quota_is_waited_for(cluster: Cluster) -> None:
    message = 'secrets "s" is forbidden: exceeded quota: q, requested: secrets=1, used: secrets=9'
    cluster.proxy.fail_next("create", "secrets", ApiError(403, "Forbidden", message))
    put_secrets(cluster, "first")
    assert held_secret(cluster) == "first"


def put_secrets(cluster: Cluster, *values: str) -> None:
    """Put a Job's Secret with each of these values in turn."""
    cluster.agent.hold_scheduling()
    where = {"config_file": str(cluster.kubeconfig), "namespace": cluster.namespace}

    async def put() -> None:
        of = watched_job(**asdict(LATER), **where, api_s=5.0)
        async with ClusterJob(of, logging.getLogger("jobs")) as job:
            for value in values:
                await job.take(body(LATER), {"KEY": value})

    asyncio.run(put())


def held_secret(cluster: Cluster) -> str:
    (secret,) = cluster.api.list_namespaced_secret(
        cluster.namespace, label_selector="batchllm.io/attempt=owner"
    ).items
    return base64.b64decode(secret.data["KEY"]).decode()


@in_triggerer
def test_existing_secrets_are_only_referred_to(shards: Shards) -> None:
    shards.plan(delay_s=0.05)
    shards.cluster.agent.add_image("job:1", python_image())  # a start from cold, for /proc
    shards.cluster.create_secret("s3-lake", {"AWS_SECRET_ACCESS_KEY": KEY})
    run = shards.start(secret_names=["s3-lake"])
    name = shards.pod()
    environment = Path(f"/proc/{shards.cluster.agent.pid(name)}/environ").read_text()
    assert KEY in environment
    pod = shards.cluster.pod(name)
    assert KEY not in json.dumps(ApiClient().sanitize_for_serialization(pod))
    run.wait()
    assert shards.cluster.api.read_namespaced_secret("s3-lake", shards.cluster.namespace)


@pytest.mark.parametrize("shards", ["sync"], indirect=True)
@pytest.mark.parametrize("with_secrets", [False, True])
def test_the_charts_role_is_enough(shards: Shards, with_secrets: bool) -> None:
    """Nothing is allowed but what the chart's Role for workers grants; by RBAC, if there is any."""
    rendered = render({"connections": {"createSecrets": with_secrets}})
    (role,) = [
        each.content for each in rendered if (each.kind, each.name) == ("Role", "batchllm-worker")
    ]
    shards.cluster.allow_only(role["rules"])
    shards.plan()
    shards.start(**(ARGUMENTS if with_secrets else {})).wait()
    shards.check_whole()
