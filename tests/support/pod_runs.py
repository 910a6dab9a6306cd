"""DAG runs whose shards are generated in a Job, as a user of Airflow's API sees and treats them.

A pod that a test has frozen (`freeze`) stays in the middle of its work until it is thawed, so
nothing here depends on who is faster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.demo_job import wait_until
from support.fake_job import document_rows
from support.standalone import POLL_S, RUNS, Standalone

NUM_ROWS = 30
LIMIT_S = 300.0  # for anything; nothing takes a tenth of it on a machine that is quiet
GENERATE = "job.generate"
KEY_ID, KEY = "AKIAOFTHELAKE", "the-secret-key-of-the-lake"
"""The connection `lake`."""


@dataclass(frozen=True)
class PodRun:
    """A run of one of the DAGs `deferring` and `waiting`, whose two workers have a shard each."""

    airflow: Standalone
    dag_id: str
    run_id: str
    ds: str

    @classmethod
    def started(cls, airflow: Standalone, dag_id: str, ds: str) -> PodRun:
        """A run over a partition of its own."""
        airflow.job.write_rows(ds, document_rows())
        run_id = airflow.trigger(dag_id, logical_date=f"{ds}T00:00:00Z")
        return cls(airflow, dag_id, run_id, ds)

    @property
    def path(self) -> str:
        return f"{RUNS.format(self.dag_id)}/{self.run_id}"

    @property
    def state(self) -> str:
        return str(self.airflow.api("GET", self.path)["state"])

    @property
    def task(self) -> dict[str, Any]:
        return dict(self.airflow.api("GET", f"{self.path}/taskInstances/{GENERATE}"))

    def wait(self, condition: Callable[[], object], what: str, poll_s: float = POLL_S) -> None:
        """Wait until `condition()` is true; fail, saying `what` was awaited and how pods are."""
        try:
            wait_until(condition, what, limit_s=LIMIT_S, poll_s=poll_s)
        except AssertionError as error:
            pods = [
                (pod.metadata.name, pod.metadata.deletion_timestamp, pod.status.phase)
                for pod in self.airflow.cluster.pods()
            ]
            raise AssertionError(f"{error}; pods: {pods}") from error

    def wait_for(self, state: str, try_number: int = 1) -> None:
        def state_now() -> tuple[str, int]:
            return self.task["state"], self.task["try_number"]

        self.wait(lambda: state_now() == (state, try_number), f"try {try_number} is {state}")

    def is_parked(self, try_number: int = 1) -> bool:
        """Whether the task is deferred, and Airflow has found out.

        It fails a task that goes on before it has noted the end of its process, and asks no trigger
        to stop what hasn't begun.
        """
        log = (self.airflow.home / "airflow.log").read_text(errors="replace")
        end = f"TaskInstance Finished: dag_id={self.dag_id}, task_id={GENERATE}"
        end += f", run_id={re.escape(self.run_id)},.* try_number={try_number},"
        if not re.search(end, log) or self.task["state"] != "deferred":
            return False
        return any(line.startswith("Job ") for line in self.log(try_number))

    def wait_until_parked(self, try_number: int = 1) -> None:
        """Until `is_parked`, or the try has succeeded."""
        self.wait(
            lambda: self.is_parked(try_number) or self.task["state"] == "success",
            f"try {try_number} is deferred",
        )

    def mark(self, state: str) -> None:
        path = f"{self.path}/taskInstances/{GENERATE}"
        self.airflow.api("PATCH", path, json={"new_state": state})

    def clear(self) -> None:
        """With what comes after it, as the page proposes it."""
        body: dict[str, Any] = {"dag_run_id": self.run_id, "task_ids": [GENERATE]}
        body |= {"dry_run": False, "only_failed": False}
        body |= {"include_downstream": True, "reset_dag_runs": True}
        self.airflow.api("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    def log(self, try_number: int = 1) -> list[str]:
        """What the page shows."""
        path = f"{self.path}/taskInstances/{GENERATE}/logs/{try_number}"
        content = self.airflow.api("GET", path, params={"full_content": True})["content"]
        return [each if isinstance(each, str) else each["event"] for each in content]

    def pods(self, worker: int) -> list[Any]:
        """Those that are there, whatever they do."""
        index = f"batch.kubernetes.io/job-completion-index={worker}"
        return self.airflow.cluster.pods(f"batchllm.io/plan={self.plan.name},{index}")

    def pod(self, worker: int) -> str:
        """The name of the worker's pod that hasn't ended."""
        live = [p for p in self.pods(worker) if p.status.phase not in ("Succeeded", "Failed")]
        (pod,) = live
        return str(pod.metadata.name)

    def thaw(self, pod: str) -> None:
        self.airflow.cluster.agent.thaw(pod)

    def is_ending(self, worker: int, name: str) -> bool:
        """Whether a pod is being stopped, or has gone already."""
        pods = [pod for pod in self.pods(worker) if pod.metadata.name == name]
        return all(pod.metadata.deletion_timestamp is not None for pod in pods)

    @property
    def plan(self) -> Path:
        return self.airflow.job.plan("job", self.ds)

    def parts(self, shard: int) -> dict[str, int]:
        """Ledger entries of the finished parts, with the time of their last change."""
        runs = self.airflow.job.path / "job" / "_batchllm" / "job" / self.ds
        found = runs.glob(f"plan-*/runs/shard-{shard:05}/*/part-?????.json")
        return {f"{e.parent.name}/{e.name}": e.stat().st_mtime_ns for e in found}

    def num_resumed_parts(self, shard: int) -> int:
        report = json.loads((self.plan / f"runs/shard-{shard:05}/report.json").read_bytes())
        return int(report["num_resumed_parts"])

    def check_success(self) -> None:
        """Everything is there once, and nothing is left in the cluster."""
        self.airflow.wait_for_runs(self.dag_id, lambda run: run["dag_run_id"] == self.run_id)
        self.airflow.job.check_published("job", self.ds, NUM_ROWS)
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        cluster, of_plan = self.airflow.cluster, f"batchllm.io/plan={self.plan.name}"
        jobs = cluster.batch.list_namespaced_job
        self.wait(
            lambda: not jobs(cluster.namespace, label_selector=of_plan).items, "no Job is left"
        )


def freeze(*runs: PodRun) -> list[str]:
    """Freeze the pods of both shards of each run when it has finished a part; their names."""
    shards = [(run, shard) for run in runs for shard in (0, 1)]
    names: dict[int, str] = {}

    def all_are_frozen() -> bool:
        for idx, (run, shard) in enumerate(shards):
            if idx not in names and run.parts(shard):
                names[idx] = run.pod(shard)
                run.airflow.cluster.agent.freeze(names[idx])
        return len(names) == len(shards)

    runs[0].wait(all_are_frozen, "all pods have finished a part", poll_s=0.02)
    for run, shard in shards:
        assert len(run.parts(shard)) < 3, "it was finished before it was frozen"
    return [names[idx] for idx in range(len(shards))]


def secrets_of_jobs(airflow: Standalone) -> list[str]:
    """Names of the Secrets that hold the connection for a Job."""
    listed = airflow.cluster.api.list_namespaced_secret(airflow.cluster.namespace).items
    names = [str(secret.metadata.name) for secret in listed]
    return sorted(name for name in names if name.startswith("batchllm"))
