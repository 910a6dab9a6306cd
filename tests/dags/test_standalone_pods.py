"""Shards in pods of a test cluster, run by a whole Airflow: what its users do, and what dies.

A pod that a test has frozen (`freeze`) stays in the middle of its work until it is thawed, so
nothing here depends on who is faster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from support.demo_job import live_processes, wait_until
from support.fake_job import document_rows, job_fields, write_table
from support.kubernetes.cluster import Backend, Cluster, python_image
from support.kubernetes.fixtures import opened_cluster
from support.pod_arguments import pod_arguments
from support.standalone import POLL_S, RUNS, SCRIPT, Standalone, free_port, script_env

NUM_ROWS = 30
LIMIT_S = 180.0  # for anything; nothing takes a tenth of it on a machine that is quiet
GENERATE = "job.generate"
KEY_ID, KEY = "AKIAOFTHELAKE", "the-secret-key-of-the-lake"
SETTINGS = {
    "TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "12",
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "12",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
}
PRINT_TRIGGERS = """
import json

from airflow.models.trigger import Trigger
from airflow.utils.session import create_session

with create_session() as session:
    print(json.dumps([trigger.kwargs for trigger in session.query(Trigger)], default=str))
"""
DAGS = """
from datetime import timedelta

from airflow.sdk import DAG
from batchllm_operator.operators import batchllm_task_group

ARGUMENTS = {arguments!r}

for dag_id, more in (
    ("deferring", {{}}),
    ("waiting", {{"deferrable": False, "retries": 1, "retry_delay": timedelta(0)}}),
):
    with DAG(dag_id, schedule=None):
        batchllm_task_group(
            {spec!r},
            group_id="job",
            runner="kubernetes",
            aws_conn_id="lake",
            generate_args=ARGUMENTS | more,
        )
"""


@dataclass(frozen=True)
class Airflow(Standalone):
    """An Airflow whose tasks make pods in `cluster`, over a lake on disk."""

    cluster: Cluster
    lake: Path

    def run(self, dag_id: str, ds: str) -> Run:
        """Start a run over a partition of its own."""
        write_table(self.lake / "documents", document_rows(), ds)
        body = {"logical_date": f"{ds}T00:00:00Z"}
        run = self.api("POST", RUNS.format(dag_id), json=body)
        return Run(self, dag_id, run["dag_run_id"], ds)

    def wait(self, condition: Callable[[], object], what: str, poll_s: float = POLL_S) -> None:
        """Wait until `condition()` is true; fail, saying `what` was awaited and how pods are."""
        try:
            wait_until(condition, what, limit_s=LIMIT_S, poll_s=poll_s)
        except AssertionError as error:
            pods = [
                (pod.metadata.name, pod.metadata.deletion_timestamp, pod.status.phase)
                for pod in self.cluster.pods()
            ]
            raise AssertionError(f"{error}; pods: {pods}") from error

    def start_triggerer(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), "triggerer"],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@dataclass(frozen=True)
class Run:
    """A DAG run; `shard` is the map index of a generate task."""

    airflow: Airflow
    dag_id: str
    run_id: str
    ds: str

    @property
    def path(self) -> str:
        return f"{RUNS.format(self.dag_id)}/{self.run_id}"

    @property
    def state(self) -> str:
        return str(self.airflow.api("GET", self.path)["state"])

    def task(self, shard: int) -> dict[str, Any]:
        return dict(self.airflow.api("GET", f"{self.path}/taskInstances/{GENERATE}/{shard}"))

    def wait_for(self, shard: int, state: str, try_number: int = 1) -> None:
        def is_there() -> bool:
            task = self.task(shard)
            return (task["state"], task["try_number"]) == (state, try_number)

        self.airflow.wait(is_there, f"try {try_number} of shard {shard} is {state}")

    def mark(self, shard: int, state: str) -> None:
        path = f"{self.path}/taskInstances/{GENERATE}/{shard}"
        self.airflow.api("PATCH", path, json={"new_state": state})

    def clear(self, *shards: int) -> None:
        """With what comes after them, as the page proposes it."""
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": [[GENERATE, shard] for shard in shards],
            "only_failed": False,
            "include_downstream": True,
            "reset_dag_runs": True,
        }
        self.airflow.api("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    def log(self, shard: int, try_number: int = 1) -> list[str]:
        """What the page shows."""
        path = f"{self.path}/taskInstances/{GENERATE}/logs/{try_number}"
        arguments = {"map_index": shard, "full_content": True}
        content = self.airflow.api("GET", path, params=arguments)["content"]
        return [each if isinstance(each, str) else each["event"] for each in content]

    def pods(self, shard: int) -> list[Any]:
        """Those that are there, whatever they do."""
        return self.airflow.cluster.pods(
            f"batchllm.io/plan={self.plan.name},batchllm.io/shard={shard}"
        )

    def pod(self, shard: int) -> str:
        (pod,) = self.pods(shard)
        return str(pod.metadata.name)

    @property
    def plan(self) -> Path:
        (folder,) = (self.airflow.lake / "out" / "_batchllm").glob(f"job/{self.ds}/plan-*")
        return folder

    def parts(self, shard: int) -> dict[str, int]:
        """Ledger entries of the finished parts, with the time of their last change."""
        found = self.airflow.lake.glob(
            f"out/_batchllm/job/{self.ds}/plan-*/runs/shard-{shard:05}/*/part-?????.json"
        )
        return {f"{e.parent.name}/{e.name}": e.stat().st_mtime_ns for e in found}

    def num_resumed_parts(self, shard: int) -> int:
        report = json.loads((self.plan / f"runs/shard-{shard:05}/report.json").read_bytes())
        return int(report["num_resumed_parts"])

    def check_success(self) -> None:
        """Everything is there once, and nothing is left in the cluster."""
        self.airflow.wait_for_runs(self.dag_id, lambda run: run["dag_run_id"] == self.run_id, 1)
        (file,) = (self.airflow.lake / "out" / f"ds={self.ds}").iterdir()
        rows = pq.ParquetFile(file).read().to_pylist()
        assert all(row["error"] is None and row["generated_text"] for row in rows)
        assert sorted(row["row_key"] for row in rows) == sorted(
            row["row_key"] for row in document_rows()
        )
        assert len(rows) == NUM_ROWS
        self.check_nothing_left(0, 1)

    def check_nothing_left(self, *shards: int) -> None:
        for shard in shards:
            self.airflow.wait(
                lambda shard=shard: not self.pods(shard), f"no pod of shard {shard} is left"
            )


def freeze(*runs: Run) -> list[str]:
    """Freeze the pods of both shards of each run when it has finished a part; their names."""
    shards = [(run, shard) for run in runs for shard in (0, 1)]
    names: dict[int, str] = {}

    def all_are_frozen() -> bool:
        for idx, (run, shard) in enumerate(shards):
            if idx not in names and run.parts(shard):
                names[idx] = run.pod(shard)
                run.airflow.cluster.agent.freeze(names[idx])
        return len(names) == len(shards)

    runs[0].airflow.wait(all_are_frozen, "all pods have finished a part", poll_s=0.02)
    for run, shard in shards:
        assert len(run.parts(shard)) < 3, "it was finished before it was frozen"
    return [names[idx] for idx in range(len(shards))]


@dataclass
class PodCounts:
    """Counts a shard's pods all the time."""

    run: Run
    shard: int
    most: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> PodCounts:
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._is_over.wait(0.1):
            self.most = max(self.most, len(self.run.pods(self.shard)))


@pytest.fixture(scope="module")
def cluster(
    kubernetes_backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with opened_cluster(kubernetes_backend, tmp_path_factory.mktemp("cluster")) as opened:
        opened.agent.add_image("job:1", python_image(BATCHLLM_PROGRESS_INTERVAL_S="0.1"))
        yield opened


@pytest.fixture(scope="module")
def airflow(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow with the two DAGs: tasks that may be deferred, and tasks that wait."""
    folder = tmp_path_factory.mktemp("pods")
    lake = folder / "lake"
    lake.mkdir()
    engine = {"extra_args": {"delay_s": 0.2, "max_in_flight": 1}}
    spec = folder / "job.yaml"
    spec.write_text(yaml.safe_dump(job_fields(str(lake), engine=engine)))
    dags = folder / "dags"
    dags.mkdir()
    arguments = pod_arguments(cluster, lake) | {"poll_interval": 0.2}
    del arguments["runner"]  # the group's
    (dags / "pods.py").write_text(DAGS.format(arguments=arguments, spec=str(spec)))
    settings = {f"BATCHLLM_AIRFLOW__{name}": value for name, value in SETTINGS.items()}
    env = script_env(folder / "home", free_port(), BATCHLLM_DAG_DIR=str(dags), **settings)
    with Airflow.started(env, folder / "output", cluster=cluster, lake=lake) as started:
        connection = {"conn_type": "aws", "login": KEY_ID, "password": KEY}
        started.api("POST", "/api/v2/connections", json={"connection_id": "lake", **connection})
        for dag_id in ("deferring", "waiting"):
            path = f"/api/v2/dags/{dag_id}?update_mask=is_paused"
            started.api("PATCH", path, json={"is_paused": False})
        yield started


def test_shards_are_generated_while_their_tasks_are_deferred(airflow: Airflow) -> None:
    run = airflow.run("deferring", "2026-03-01")
    pods = freeze(run)
    for shard in (0, 1):
        run.wait_for(shard, "deferred")
    airflow.wait(
        lambda: any(is_progress(line) for line in run.log(0)), "a line with an ETA is in the log"
    )
    assert run.task(0)["state"] == "deferred"
    check_triggers(airflow)
    assert secrets_of_pods(airflow) == sorted(pods)
    for pod in pods:
        airflow.cluster.agent.thaw(pod)
    run.check_success()
    for shard, pod in enumerate(pods):
        log = run.log(shard)
        assert any(f"Made pod {pod}" in line for line in log)
        told = [line for line in log if line.startswith((f"shard {shard}: ", f"Pod {pod}: "))]
        assert len(told) > 5
        assert [line for line, count in Counter(told).items() if count > 1] == []


def secrets_of_pods(airflow: Airflow) -> list[str]:
    """Names of the Secrets that hold the connection for a pod."""
    listed = airflow.cluster.api.list_namespaced_secret(airflow.cluster.namespace).items
    names = [str(secret.metadata.name) for secret in listed]
    return sorted(name for name in names if name.startswith("batchllm"))


def check_triggers(airflow: Airflow) -> None:
    """What Airflow keeps of two triggers is what they need, and no credential."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", PRINT_TRIGGERS],
        env={**os.environ, "AIRFLOW_HOME": str(airflow.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    triggers = json.loads(run.stdout.splitlines()[-1])  # Airflow 3.2 logs to the same stream
    assert len(triggers) == 2
    for arguments in triggers:
        assert arguments["config_file"] == str(airflow.cluster.kubeconfig)
        for secret in (airflow.cluster.double.access.user_token, KEY):
            assert secret not in repr(arguments)


def is_progress(line: str) -> bool:
    return line.startswith("shard ") and "ETA" in line


def test_deferred_tasks_that_the_user_marks_or_clears(airflow: Airflow) -> None:
    run = airflow.run("deferring", "2026-03-02")
    marked, cleared = freeze(run)
    before = run.parts(0)
    for shard in (0, 1):
        run.wait_for(shard, "deferred")
    with PodCounts(run, 0) as of_marked, PodCounts(run, 1) as of_cleared:
        run.clear(1)
        run.mark(0, "failed")
        airflow.wait(lambda: is_ending(run, 0, marked), "the marked task's pod is asked to stop")
        airflow.cluster.agent.thaw(marked)
        run.check_nothing_left(0)
        assert run.task(0)["state"] == "failed"
        # Airflow may be so quick that the next try waits already: then it has taken the pod up.
        airflow.wait(
            lambda: is_ending(run, 1, cleared) or run.task(1)["state"] == "deferred",
            "the cleared task's pod is asked to stop, or is taken up",
        )
        airflow.cluster.agent.thaw(cleared)
        run.clear(0)
        run.check_success()
    assert of_marked.most == of_cleared.most == 1
    assert run.task(0)["try_number"] == run.task(1)["try_number"] == 2
    assert before.items() <= run.parts(0).items()  # not generated again
    assert run.num_resumed_parts(0) >= 1


def is_ending(run: Run, shard: int, name: str) -> bool:
    """Whether a pod was told to stop, or has gone already."""
    pods = [pod for pod in run.pods(shard) if pod.metadata.name == name]
    return all(pod.metadata.deletion_timestamp is not None for pod in pods)


def kill_worker(task_pid: int) -> None:
    """Kill a task's process and the one that supervises it."""
    stat = Path(f"/proc/{task_pid}/stat").read_text()
    supervisor_pid = int(stat.rpartition(")")[2].split()[1])
    for pid in (supervisor_pid, task_pid):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def next_triggerer(airflow: Airflow) -> Iterator[Callable[[], None]]:
    """Kills the triggerer and starts another one, which stays until the test is over."""
    started: list[subprocess.Popen[bytes]] = []

    def replace() -> None:
        for pid in live_processes(airflow.session_id):
            with suppress(FileNotFoundError, ProcessLookupError):
                if "triggerer" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        started.append(airflow.start_triggerer())

    yield replace
    for process in started:
        process.terminate()
        process.wait()
        for pid in live_processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_and_the_triggerer_die_and_a_run_is_marked_failed(
    airflow: Airflow, next_triggerer: Callable[[], None]
) -> None:
    """Two runs at once: Airflow takes its time to find out about either death."""
    waiting = airflow.run("waiting", "2026-03-03")
    deferring = airflow.run("deferring", "2026-03-04")
    thaw = airflow.cluster.agent.thaw
    marked, killed, *pods = freeze(waiting, deferring)
    assert [waiting.task(shard)["state"] for shard in (0, 1)] == ["running", "running"]
    for shard in (0, 1):
        deferring.wait_for(shard, "deferred")
    old = deferring.task(0)["triggerer_job"]["id"]
    kill_worker(waiting.task(1)["pid"])
    next_triggerer()

    waiting.mark(0, "failed")
    airflow.wait(lambda: is_ending(waiting, 0, marked), "the marked task's pod is asked to stop")
    thaw(marked)
    waiting.check_nothing_left(0)

    def have_another_triggerer() -> bool:
        jobs = [deferring.task(shard)["triggerer_job"] for shard in (0, 1)]
        return all(job is not None and job["id"] != old for job in jobs)

    airflow.wait(have_another_triggerer, "another triggerer has the pods")
    thaw(pods[0])
    deferring.wait_for(0, "success")
    assert deferring.num_resumed_parts(0) == 0  # one pod did it all
    assert deferring.pod(1) == pods[1]
    airflow.api("PATCH", deferring.path, json={"state": "failed"})
    airflow.wait(lambda: is_ending(deferring, 1, pods[1]), "the pod is asked to stop")
    thaw(pods[1])
    deferring.check_nothing_left(0, 1)
    assert deferring.task(1)["state"] == "failed"

    waiting.wait_for(1, "running", try_number=2)
    airflow.wait(
        lambda: any("Taking up pod" in line for line in waiting.log(1, 2)), "it is taken up"
    )
    assert waiting.pod(1) == killed
    thaw(killed)
    waiting.wait_for(1, "success", try_number=2)
    assert waiting.num_resumed_parts(1) == 0  # one pod did it all
    # Airflow ends a run that was cleared just before, and nobody takes it up again.
    airflow.wait(lambda: waiting.state == "failed", "the run has ended")
    waiting.clear(0)
    waiting.check_success()


def test_neither_database_nor_logs_hold_a_credential(airflow: Airflow) -> None:
    """After all the runs above; what is encrypted there is in the first test."""
    tokens = [airflow.cluster.double.access.user_token, KEY]
    files = [*airflow.home.glob("airflow.db*"), *airflow.home.rglob("*.log")]
    assert len(files) > 10
    for file in files:
        content = file.read_bytes()
        assert [token for token in tokens if token.encode() in content] == [], file
    airflow.wait(lambda: not secrets_of_pods(airflow), "the Secrets have gone with their pods")
