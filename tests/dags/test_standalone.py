"""`make airflow` from outside: the command line, the REST API, and the lake table that results."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow.parquet as pq
import pytest
from support.demo_job import live_processes, wait_until
from support.standalone import (
    POLL_S,
    RUNS_S,
    Standalone,
    free_port,
    script_env,
    start_script,
)

Job = Any  # the class in conftest.py

POOL_SLOTS = 1
RUN_DAY = "2026-01-25"
BACKFILL_DAYS = ["2026-01-28", "2026-01-29", "2026-01-30"]
ARRIVING_DAYS = ["2026-02-01", "2026-02-02", "2026-02-03"]
LAST_DAY = "2026-02-10"


@dataclass(frozen=True)
class Examples(Standalone):
    """An Airflow with this repository's DAGs, and their job folder."""

    job: Job

    def has_no_backfill(self) -> bool:
        """Whether all are over: Airflow takes one at a time for a DAG, and looks every 30 s."""
        backfills = self.api("GET", "/api/v2/backfills", params={"dag_id": "daily_snippets"})
        return all(backfill["completed_at"] for backfill in backfills["backfills"])

    def keys(self, ds: str) -> list[str]:
        """The keys of a published partition, whose rows all have a text."""
        rows = pq.ParquetFile(self.job.published("daily_snippets", ds)).read().to_pylist()
        assert all(row["error"] is None and row["generated_text"] for row in rows)
        return sorted(row["id"] for row in rows)


def examples_env(home: Path, job: Job, port: int) -> dict[str, str]:
    settings = {"BATCHLLM_SPEC_DIR": str(job.folder), "POOL_SLOTS": str(POOL_SLOTS)}
    return script_env(home, port, **settings)


@pytest.fixture(scope="module")
def standalone(
    tmp_path_factory: pytest.TempPathFactory, make_job: Callable[[Path], Job]
) -> Iterator[Examples]:
    """Airflow with this repository's DAGs on the engine without a model."""
    folder = tmp_path_factory.mktemp("standalone")
    job = make_job(folder / "job")
    job.write_spec("daily_snippets", planner={"num_shards": 1})
    today = datetime.now(UTC).date()  # daily_snippets is on: yesterday's run starts by itself
    recent = [str(today - timedelta(days=ago)) for ago in (0, 1)]
    for ds in (RUN_DAY, *BACKFILL_DAYS, *ARRIVING_DAYS, LAST_DAY, *recent):
        job.write_table(ds)
    env = examples_env(folder / "airflow home", job, free_port())
    with Examples.started(env, folder / "output", job=job) as airflow:
        yield airflow


def at_a_time(spans: Iterable[Mapping[str, Any]]) -> int:
    """The most that were running at one time."""
    times = []
    for span in spans:
        start, end = (datetime.fromisoformat(span[name]) for name in ("start_date", "end_date"))
        times += [(start, 1), (end, -1)]
    most = running = 0
    for _, change in sorted(times):
        running += change
        most = max(most, running)
    return most


def test_the_printed_password_is_the_only_one_that_lets_in(standalone: Examples) -> None:
    password = standalone.printed("password")
    assert standalone.log_in(password).status_code == 201
    assert standalone.log_in(password + "x").status_code == 401
    assert httpx.get(standalone.url + "/api/v2/dags", trust_env=False).status_code == 401


def test_a_backfill_commits_each_date_by_itself(standalone: Examples) -> None:
    first, *_, last = BACKFILL_DAYS
    standalone.command(
        *("backfill", "create", "--dag-id", "daily_snippets", "--max-active-runs", "2"),
        *("--from-date", first, "--to-date", last, "--run-backwards"),
    )
    runs = standalone.wait_for_runs(
        "daily_snippets", lambda run: run["run_type"] == "backfill" and run["conf"] == {}, 3
    )
    assert sorted(run["logical_date"][:10] for run in runs) == BACKFILL_DAYS
    assert at_a_time(runs) == 2
    extras = [event["extra"] for event in standalone.events("snippets")]
    for ds in BACKFILL_DAYS:
        assert standalone.keys(ds) == standalone.job.keys()
        report = standalone.job.plan_folder("daily_snippets", ds) / "report.json"
        written = json.loads(report.read_bytes())
        assert (written["ds"], written["num_rows_out"]) == (ds, 12)
        (extra,) = [extra for extra in extras if extra["ds"] == ds]
        counts = ("num_rows_in", "num_rows_out", "num_rows_failed")
        assert tuple(extra[name] for name in counts) == (12, 12, 0)
        assert extra["achieved_saving_ratio"] == written["achieved_saving_ratio"]
        assert extra["report_uri"] == str(report)
        assert extra["plan_uri"] == str(report.parent)


def test_each_partition_that_arrives_is_run(standalone: Examples) -> None:
    """The last two come so close together that Airflow may give both to one run, or lose one."""
    by_dag, *by_api = ARRIVING_DAYS
    standalone.command("dags", "trigger", "documents_arrive", "--conf", json.dumps({"ds": by_dag}))
    asset_id = standalone.asset_id("documents")
    for ds in by_api:
        arrival = {"asset_id": asset_id, "extra": {"ds": ds}}
        standalone.api("POST", "/api/v2/assets/events", json=arrival)

    def are_committed() -> bool:
        """Whether runs that the events led to have committed them."""
        events = standalone.events("snippets")
        runs = [event for event in events if event["source_dag_id"] == "snippets_on_arrival"]
        standalone.check_no_failure(standalone.tasks("snippets_on_arrival"))
        return {run["extra"]["ds"] for run in runs} == set(ARRIVING_DAYS)

    wait_until(are_committed, "all partitions are committed", limit_s=RUNS_S, poll_s=POLL_S)
    for ds in ARRIVING_DAYS:
        assert standalone.keys(ds) == standalone.job.keys()
    tasks = standalone.tasks("snippets_on_arrival")
    plans = [task for task in tasks if task["task_id"] == "snippets.plan"]
    at_work = [plan["dag_run_id"] for plan in plans if plan["state"] not in (None, "skipped")]
    assert len(at_work) == len(ARRIVING_DAYS), "a partition was run twice"


def test_a_run_commits_its_date_and_doing_it_again_replaces_the_partition(
    standalone: Examples,
) -> None:
    def runs_of_the_day(run: Mapping[str, Any]) -> bool:
        return str(run["logical_date"]).startswith(RUN_DAY)

    standalone.command("dags", "trigger", "daily_snippets", "--logical-date", RUN_DAY)
    (before,) = standalone.wait_for_runs("daily_snippets", runs_of_the_day, 1)
    old = standalone.keys(RUN_DAY)
    assert old == standalone.job.keys()

    standalone.job.write_table(RUN_DAY, num_documents=6)
    new = standalone.job.keys(num_documents=6)
    wait_until(
        standalone.has_no_backfill, "Airflow takes another backfill", limit_s=RUNS_S, poll_s=POLL_S
    )
    with Reader(standalone.job.folder / "daily_snippets" / f"ds={RUN_DAY}") as reader:
        standalone.command(
            *("backfill", "create", "--dag-id", "daily_snippets", "--max-active-runs", "2"),
            *("--from-date", RUN_DAY, "--to-date", RUN_DAY, "--reprocess-behavior", "completed"),
        )

        def runs_again(run: Mapping[str, Any]) -> bool:
            return runs_of_the_day(run) and run["end_date"] != before["end_date"]

        standalone.wait_for_runs("daily_snippets", runs_again, 1)
    assert reader.seen == [old, new]  # and never a part, a mixture or nothing
    counts = [
        event["extra"]["num_rows_out"]
        for event in standalone.events("snippets")
        if event["extra"]["ds"] == RUN_DAY
    ]
    assert counts == [12, 18]


class Reader:
    """Somebody who reads a partition over and over."""

    def __init__(self, partition: Path) -> None:
        self.seen: list[list[str]] = []
        """The keys that were read, each time that they changed."""
        self._partition = partition
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read_all)

    def __enter__(self) -> Reader:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._read()

    def _read_all(self) -> None:
        while not self._is_over.wait(0.005):
            self._read()

    def _read(self) -> None:
        keys: list[str] = []
        for file in self._partition.glob("*.parquet"):
            table = pq.ParquetFile(io.BytesIO(file.read_bytes())).read(["id"])
            keys += table["id"].to_pylist()
        if not self.seen or self.seen[-1] != sorted(keys):
            self.seen.append(sorted(keys))


def test_generate_tasks_of_all_runs_share_the_pools_slots(standalone: Examples) -> None:
    """Of those that the tests above have led to; plan and commit go without."""
    tasks = [*standalone.tasks("daily_snippets"), *standalone.tasks("snippets_on_arrival")]
    ended = [task for task in tasks if task["end_date"] and task["start_date"]]
    generate = [task for task in ended if task["task_id"] == "snippets.generate"]
    assert {task["pool"] for task in generate} == {"batchllm_gpu"}
    others = [task for task in ended if task["task_id"] != "snippets.generate"]
    assert {task["pool"] for task in others} == {"default_pool"}
    assert at_a_time(generate) <= POOL_SLOTS


def test_the_plugins_pages_show_what_has_run(standalone: Examples) -> None:
    """Of yesterday's run, which has started by itself."""
    (run,) = standalone.wait_for_runs(
        "daily_snippets", lambda run: run["run_type"] == "scheduled", 1
    )
    run_path = f"daily_snippets/runs/{quote(run['dag_run_id'], safe='')}"
    (plugin,) = standalone.api("GET", "/api/v2/plugins")["plugins"]
    assert (plugin["name"], len(plugin["external_views"])) == ("batchllm", 2)
    assert standalone.api("GET", "/api/v2/plugins/importErrors")["total_entries"] == 0

    listed = standalone.page("/batchllm/")
    assert "daily_snippets" in listed and ">committed</span>" in listed
    assert f'href="/batchllm/dags/{run_path}/jobs/snippets.plan/-1"' in listed
    report = standalone.page(f"/batchllm/dags/{run_path}")
    assert "report.html" in report and "<script" not in report

    task_path = "dagRuns/{}/taskInstances/snippets.generate/links".format(run["dag_run_id"])
    links = standalone.api(
        "GET", f"/api/v2/dags/daily_snippets/{task_path}", params={"map_index": 0}
    )
    shard = f"/batchllm/dags/{run_path}/tasks/snippets.generate/0"
    assert links["extra_links"] == {"Live progress": shard}
    assert standalone.page(shard) == report  # which the shard's page leads to after the commit

    stranger = httpx.get(
        standalone.url + "/batchllm/",
        headers={"accept": "text/html"},
        follow_redirects=True,
        timeout=60,
        trust_env=False,
    )
    assert stranger.url.path == "/auth/login" and "daily_snippets" not in stranger.text


def test_a_second_one_in_the_same_place_is_refused(standalone: Examples) -> None:
    run = start_script({**standalone.env, "PORT": str(free_port())})
    assert run.returncode == 1
    assert f"running in {standalone.env['BATCHLLM_AIRFLOW_HOME']}" in run.stderr
    assert standalone.process.poll() is None


def test_ctrl_c_ends_everything_also_a_task_that_is_running(standalone: Examples) -> None:
    job = standalone.job
    job.write_spec(
        "daily_snippets", engine={"extra_args": {"delay_s": 20.0}}, planner={"num_shards": 1}
    )
    standalone.command("dags", "trigger", "daily_snippets", "--logical-date", LAST_DAY)
    wait_until(
        lambda: commands(standalone.session_id, "run"), "a shard is being generated", limit_s=RUNS_S
    )
    standalone.process.send_signal(signal.SIGINT)
    assert standalone.process.wait(timeout=60) == 130
    assert live_processes(standalone.session_id) == []
    with pytest.raises(httpx.ConnectError):
        standalone.log_in("any")


def test_it_starts_again_with_what_it_had(standalone: Examples, tmp_path: Path) -> None:
    standalone.process.send_signal(signal.SIGINT)
    standalone.process.wait(timeout=60)
    env = {**standalone.env, "POOL_SLOTS": "3"}
    with Examples.started(env, tmp_path / "output", job=standalone.job) as again:
        pool = again.api("GET", "/api/v2/pools/batchllm_gpu")
        assert (pool["slots"], pool["include_deferred"]) == (3, True)
        assert again.printed("paused") == "offline_ranking"
        assert again.printed("password") == standalone.printed("password")


def commands(session_id: int, name: str) -> list[int]:
    """The processes of a session that are `batchllm NAME ...`."""
    found = []
    for pid in live_processes(session_id):
        with suppress(FileNotFoundError, ProcessLookupError):
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "batchllm_operator.cli" in argv and name in argv:
                found.append(pid)
    return found


def test_a_busy_port_is_said_at_once(tmp_path: Path, job: Job) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        run = start_script(examples_env(tmp_path / "home", job, port))
    assert run.returncode == 1
    assert run.stderr == f"airflow: port {port} is in use; choose another one with PORT=\n"
    assert not (tmp_path / "home" / "airflow.db").exists()


@pytest.mark.parametrize("port", ["http", "0", "65536", "80 80", ""])
def test_what_is_no_port_is_refused(tmp_path: Path, job: Job, port: str) -> None:
    env = {**examples_env(tmp_path / "home", job, 1), "PORT": port or " "}
    run = start_script(env)
    assert run.returncode == 2
    assert "is not a port" in run.stderr


def test_a_command_without_an_airflow_says_what_to_do(tmp_path: Path, job: Job) -> None:
    run = start_script(examples_env(tmp_path / "home", job, 8080), "dags", "list")
    assert run.returncode == 1
    assert "make airflow" in run.stderr
