"""An Airflow that `scripts/airflow.sh` runs, as its user has it: command line and REST API."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from support.demo_job import live_processes, wait_until
from support.fake_job import JobFolder
from support.kubernetes.cluster import Cluster

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "airflow.sh"
POLL_S = 1.0  # of the API, which works for it
API_S = 180.0  # for an answer: longer than SQLite waits for another writer
RUNS_S = 900.0  # for some runs; on two busy cores a task takes a minute to import what it needs
RUNS = "/api/v2/dags/{}/dagRuns"


@dataclass(frozen=True)
class Standalone:
    """An Airflow that `scripts/airflow.sh` runs, its jobs, and the cluster of their pods."""

    process: subprocess.Popen[str]
    env: Mapping[str, str]
    url: str
    session_id: int
    output: Callable[[], str]
    client: httpx.Client
    job: JobFolder
    cluster: Cluster

    @classmethod
    @contextmanager
    def started(
        cls, env: Mapping[str, str], output: Path, job: JobFolder, cluster: Cluster
    ) -> Iterator[Standalone]:
        """Start one and wait until it is ready; nothing of it is left afterwards."""
        pid_file = Path(env["BATCHLLM_AIRFLOW_HOME"]) / "pid"
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", str(SCRIPT)],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=restore_ctrl_c,
            )
        try:
            wait_until(
                lambda: process.poll() is not None or "Ctrl-C" in output.read_text(),
                "it is ready",
                limit_s=RUNS_S,
            )
            assert process.poll() is None, output.read_text()
            url = f"http://127.0.0.1:{env['PORT']}"
            pid = int(pid_file.read_text())
            with httpx.Client(base_url=url, timeout=API_S, trust_env=False) as client:
                yield cls(process, env, url, pid, output.read_text, client, job, cluster)
        finally:
            process.terminate()
            process.wait()
            if pid_file.exists():
                for pid in live_processes(int(pid_file.read_text())):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    @property
    def home(self) -> Path:
        return Path(self.env["BATCHLLM_AIRFLOW_HOME"])

    def command(self, *args: str) -> None:
        """What the output tells the user to type."""
        run = start_script(self.env, *args)
        assert run.returncode == 0, run.stdout + run.stderr

    def printed(self, label: str) -> str:
        """What the output says of `label`."""
        (value,) = re.findall(rf"^  {label} +(\S+)$", self.output(), re.MULTILINE)
        return str(value)

    def log_in(self, password: str) -> httpx.Response:
        login = {"username": self.printed("user"), "password": password}
        return self.client.post("/auth/token", json=login)

    @cached_property
    def _headers(self) -> dict[str, str]:
        token = self.log_in(self.printed("password")).json()["access_token"]
        return {"Authorization": f"Bearer {token}"}

    def api(self, method: str, path: str, **arguments: Any) -> Any:
        """The answer to a request; asks again while SQLite has another writer for too long."""
        answers: list[httpx.Response] = []

        def is_answered() -> bool:
            answers[:] = [self.client.request(method, path, headers=self._headers, **arguments)]
            return "Database error" not in answers[0].text

        wait_until(is_answered, f"{path} is answered", limit_s=RUNS_S, poll_s=POLL_S)
        assert answers[0].is_success, answers[0].text
        return answers[0].json()

    def page(self, path: str) -> str:
        """A page that a browser gets, wherever that leads."""
        headers = {"accept": "text/html", **self._headers}
        answer = self.client.get(path, headers=headers, follow_redirects=True)
        assert answer.is_success, answer.text
        return answer.text

    def dag_ids(self) -> set[str]:
        return {dag["dag_id"] for dag in self.api("GET", "/api/v2/dags")["dags"]}

    def trigger(self, dag_id: str, **body: Any) -> str:
        """Start a run; its id."""
        body = {"logical_date": None, **body}
        return str(self.api("POST", RUNS.format(dag_id), json=body)["dag_run_id"])

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.api("GET", RUNS.format(dag_id))["dag_runs"])

    def tasks(self, dag_id: str, run_id: str = "~") -> list[dict[str, Any]]:
        """The task instances of a run of a DAG, or of all."""
        path = RUNS.format(dag_id) + f"/{run_id}/taskInstances"
        return list(self.api("GET", path, params={"limit": 500})["task_instances"])

    def wait_for_runs(
        self,
        dag_id: str,
        choose: Callable[[dict[str, Any]], bool],
        number: int = 1,
    ) -> list[dict[str, Any]]:
        """Wait until `number` chosen runs have succeeded, and return them."""
        chosen: list[dict[str, Any]] = []

        def succeeded() -> bool:
            chosen[:] = [run for run in self.runs(dag_id) if choose(run)]
            assert [run["dag_run_id"] for run in chosen if run["state"] == "failed"] == []
            return len(chosen) == number and all(run["state"] == "success" for run in chosen)

        wait_until(
            succeeded, f"{number} runs of {dag_id} have succeeded", limit_s=RUNS_S, poll_s=POLL_S
        )
        return chosen

    def events(self, asset: str) -> list[dict[str, Any]]:
        """The events of an asset, the oldest first."""
        arguments = {"asset_id": self.asset_id(asset), "order_by": "timestamp"}
        return list(self.api("GET", "/api/v2/assets/events", params=arguments)["asset_events"])

    def asset_id(self, name: str) -> int:
        assets = self.api("GET", "/api/v2/assets", params={"name_pattern": name})["assets"]
        (asset_id,) = (asset["id"] for asset in assets if asset["name"] == name)
        return int(asset_id)


def bundle(name: str, **arguments: str) -> dict[str, Any]:
    """A folder of DAGs."""
    local = "airflow.dag_processing.bundles.local.LocalDagBundle"
    return {"name": name, "classpath": local, "kwargs": arguments}


def script_env(home: Path, port: int, **settings: str) -> dict[str, str]:
    """The environment of a caller who has an Airflow of another kind; `settings` are ours."""
    callers = {"AIRFLOW_HOME": "/nowhere", "AIRFLOW__CORE__EXECUTOR": "NoSuchExecutor"}
    return {
        **os.environ,
        **callers,
        "BATCHLLM_AIRFLOW_HOME": str(home),
        "BATCHLLM_VENV": sys.prefix,
        "PORT": str(port),
        **settings,
    }


def start_script(env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    command = ["bash", str(SCRIPT), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def restore_ctrl_c() -> None:
    """Who starts tests in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
