"""One Airflow for the tests of a file: this repository's DAGs, and DAGs whose shards have pods."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from support.browser import chromium
from support.demo_job import wait_until
from support.fake_job import JobFolder
from support.fork_server import ForkServer
from support.kubernetes.cluster import (
    Backend,
    kubernetes_backend,
    opened_cluster,
    python_image,
)
from support.pod_arguments import pod_arguments
from support.pod_runs import KEY, KEY_ID
from support.standalone import POLL_S, Standalone, bundle, free_port, script_env

__all__ = ["chromium", "kubernetes_backend"]

# DAG files don't change here.
SETTINGS = {
    "DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "1",  # a process that has ended is found out soon
}
# Processes that fork one for each task and each DAG file have imported what these need.
PRELOAD = """
import sys

if {"scheduler", "dag-processor"} & {*sys.argv}:
    import batchllm_operator.operators
"""
PODS = """
from datetime import timedelta

from airflow.sdk import DAG
from batchllm_operator.operators import batchllm_task_group

for dag_id, more in (
    ("deferring", {{"deferrable": True}}),
    ("waiting", {{"deferrable": False, "retries": 1, "retry_delay": timedelta(0)}}),
):
    with DAG(dag_id, schedule=None, is_paused_upon_creation=False):
        batchllm_task_group(
            {spec!r},
            group_id="job",
            runner="kubernetes",
            lake_conn_id="lake",
            # No task looks whether the plan is whole while a test has frozen its pods.
            generate_args={arguments!r} | {{"look_interval": timedelta(hours=1)}} | more,
        )
"""


@pytest.fixture(scope="module")
def standalone(
    request: pytest.FixtureRequest,
    kubernetes_backend: Backend,
    commands: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Standalone]:
    """Airflow as `make airflow` starts it, and a cluster. Its jobs need no model.

    A file's own `SETTINGS` are added.
    """
    folder = tmp_path_factory.mktemp("standalone")
    job = JobFolder(folder / "job")
    job.path.mkdir()
    job.write_spec("daily_snippets", planner={"num_shards": 1}, max_failed_fraction=0.9)
    today = datetime.now(UTC).date()  # daily_snippets is on: yesterday's run starts by itself
    for ago in (0, 1):
        job.write_rows(str(today - timedelta(days=ago)))
    home, dags = folder / "airflow home", folder / "dags"
    (home / "plugins").mkdir(parents=True)
    (home / "plugins" / "preload.py").write_text(PRELOAD)
    dags.mkdir()
    bundles = [bundle("dags-folder"), bundle("pods", path=str(dags))]
    settings = SETTINGS | getattr(request.module, "SETTINGS", {})
    settings |= {"DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles)}
    env = script_env(
        home,
        free_port(),
        BATCHLLM_SPEC_DIR=str(job.path),
        POOL_SLOTS="1",
        **{f"BATCHLLM_AIRFLOW__{name}": value for name, value in settings.items()},
    )
    with opened_cluster(kubernetes_backend, tmp_path_factory.mktemp("cluster")) as cluster:
        image = python_image(commands, BATCHLLM_PROGRESS_OBJECT_INTERVAL_S="0.1")
        cluster.agent.add_image("job:1", image)
        arguments = pod_arguments(cluster, job.path) | {"poll_interval": 0.2}
        del arguments["runner"]  # the group's
        spec = job.write_spec("job", engine={"extra_args": {"delay_s": 0.2, "max_in_flight": 1}})
        (dags / "pods.py").write_text(PODS.format(arguments=arguments, spec=spec))
        with Standalone.started(env, folder / "output", job, cluster) as airflow:
            connection = {"conn_type": "aws", "login": KEY_ID, "password": KEY}
            airflow.api("POST", "/api/v2/connections", json={"connection_id": "lake", **connection})
            wait_until(
                lambda: {"deferring", "waiting"} <= airflow.dag_ids(),
                "all DAGs have been read",
                poll_s=POLL_S,
            )
            yield airflow
