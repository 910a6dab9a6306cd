"""`make airflow`: backfills and arrivals, what a user marks or clears, what dies, and its end.

Nothing here depends on who is faster: pods that matter stay frozen until it's their turn.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.demo_job import live_processes, wait_until
from support.fake_job import document_rows
from support.pod_runs import KEY, PodRun, freeze
from support.standalone import POLL_S, RUNS_S, SCRIPT, Standalone

from batchllm_operator.stored_plan.run_report import RunReport

DAYS = ["2026-01-28", "2026-01-29"]
ARRIVING_DAYS = ["2026-02-02", "2026-02-03"]
LAST_DAY = "2026-02-10"
# What dies is found out soon.
SETTINGS = {
    "TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "12",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "12",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
}
PRINT_TRIGGERS = """
import json

from airflow.models.trigger import Trigger
from airflow.utils.session import create_session

with create_session() as session:
    print(json.dumps([trigger.kwargs for trigger in session.query(Trigger)], default=str))
"""


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


def backfill(airflow: Standalone, *arguments: str) -> None:
    """As the output tells the user to type it."""
    airflow.command(
        *("backfill", "create", "--dag-id", "daily_snippets", "--max-active-runs", "2"),
        *arguments,
    )


def test_a_backfill_commits_each_date_by_itself(standalone: Standalone) -> None:
    for ds in DAYS:
        standalone.job.write_rows(ds)
    backfill(standalone, "--from-date", DAYS[0], "--to-date", DAYS[1], "--run-backwards")
    runs = standalone.wait_for_runs(
        "daily_snippets", lambda run: run["run_type"] == "backfill", len(DAYS)
    )
    assert sorted(run["logical_date"][:10] for run in runs) == DAYS
    assert at_a_time(runs) == 2
    extras = [event["extra"] for event in standalone.events("snippets")]
    for ds in DAYS:
        standalone.job.check_published("daily_snippets", ds)
        file = standalone.job.plan("daily_snippets", ds) / "report.json"
        report = RunReport.from_bytes(file.read_bytes(), source=str(file))
        assert (report.ds, report.num_rows_out) == (ds, 12)
        (extra,) = [extra for extra in extras if extra["ds"] == ds]
        assert extra["achieved_saving_ratio"] == report.achieved_saving


def test_partitions_that_arrive_close_together_are_run_each(standalone: Standalone) -> None:
    """Airflow may give both to one run, or lose one."""
    for ds in ARRIVING_DAYS:
        standalone.job.write_rows(ds)
    asset_id = standalone.asset_id("documents")
    for ds in ARRIVING_DAYS:
        arrival = {"asset_id": asset_id, "extra": {"ds": ds}}
        standalone.api("POST", "/api/v2/assets/events", json=arrival)

    def are_committed() -> bool:
        """Whether runs that the events led to have committed them."""
        events = standalone.events("snippets")
        runs = [event for event in events if event["source_dag_id"] == "snippets_on_arrival"]
        return {run["extra"]["ds"] for run in runs} == set(ARRIVING_DAYS)

    wait_until(are_committed, "all partitions are committed", limit_s=RUNS_S, poll_s=POLL_S)
    for ds in ARRIVING_DAYS:
        standalone.job.check_published("daily_snippets", ds)
    tasks = standalone.tasks("snippets_on_arrival")
    plans = [task for task in tasks if task["task_id"] == "snippets.plan"]
    at_work = [plan["dag_run_id"] for plan in plans if plan["state"] not in (None, "skipped")]
    assert len(at_work) == len(ARRIVING_DAYS), "a partition was run twice"


def test_generate_tasks_of_all_runs_share_the_pools_slots(standalone: Standalone) -> None:
    """Of those that the tests above have led to."""
    tasks = [*standalone.tasks("daily_snippets"), *standalone.tasks("snippets_on_arrival")]
    generate = [task for task in tasks if task["task_id"] == "snippets.generate"]
    ended = [task for task in generate if task["end_date"] and task["start_date"]]
    assert len(ended) >= len(DAYS) + len(ARRIVING_DAYS)
    assert at_a_time(ended) == 1


def test_doing_a_date_again_replaces_the_partition(standalone: Standalone) -> None:
    ds = DAYS[0]

    def has_no_backfill() -> bool:
        """Airflow takes one at a time for a DAG, and looks every 30 s."""
        backfills = standalone.api("GET", "/api/v2/backfills", params={"dag_id": "daily_snippets"})
        return all(backfill["completed_at"] for backfill in backfills["backfills"])

    wait_until(has_no_backfill, "Airflow takes another backfill", limit_s=RUNS_S, poll_s=POLL_S)
    ended = {run["end_date"] for run in standalone.runs("daily_snippets")}
    standalone.job.write_rows(ds, document_rows(6, 3))
    backfill(standalone, "--from-date", ds, "--to-date", ds, "--reprocess-behavior", "completed")
    standalone.wait_for_runs(
        "daily_snippets",
        lambda run: run["logical_date"].startswith(ds) and run["end_date"] not in ended,
    )
    standalone.job.check_published("daily_snippets", ds, num_rows=18)
    extras = [event["extra"] for event in standalone.events("snippets")]
    assert [extra["num_rows_out"] for extra in extras if extra["ds"] == ds] == [12, 18]


# Pods


def check_triggers(airflow: Standalone) -> None:
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
        for secret in (airflow.cluster.proxy.token, KEY):
            assert secret not in repr(arguments)


def test_deferred_tasks_that_the_user_marks_or_clears(standalone: Standalone) -> None:
    marked = PodRun.started(standalone, "deferring", "2026-03-02")
    cleared = PodRun.started(standalone, "deferring", "2026-03-05")
    pods = freeze(marked, cleared)
    before = marked.parts(0)
    for run in (marked, cleared):
        run.wait_until_parked()
    check_triggers(standalone)
    standalone.cluster.agent.hold_images("job:1")  # pods of next tries begin when those are parked
    cleared.clear()
    marked.mark("failed")
    marked.wait(lambda: marked.is_ending(0, pods[0]), "the marked task's pods are stopped")
    for pod in pods[:2]:
        marked.thaw(pod)
    marked.check_nothing_left()
    assert marked.task["state"] == "failed"
    # Airflow may be so quick that the next try waits already: then it has adopted the Job.
    cleared.wait(
        lambda: cleared.is_ending(0, pods[2]) or cleared.is_parked(try_number=2),
        "the cleared task's pods are stopped, or adopted",
    )
    for pod in pods[2:]:
        cleared.thaw(pod)
    marked.clear()
    for run in (marked, cleared):
        run.wait_until_parked(try_number=2)
    standalone.cluster.agent.release_images("job:1")
    for run in (marked, cleared):
        run.check_success()
        assert run.task["try_number"] == 2
    assert before.items() <= marked.parts(0).items()  # not generated again
    assert marked.num_resumed_parts(0) >= 1


def kill_worker(task_pid: int) -> None:
    """Kill a task's process and the one that supervises it."""
    stat = Path(f"/proc/{task_pid}/stat").read_text()
    supervisor_pid = int(stat.rpartition(")")[2].split()[1])
    for pid in (supervisor_pid, task_pid):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def next_triggerer(standalone: Standalone) -> Iterator[Callable[[], None]]:
    """Kills the triggerer and starts another one, which stays until the test is over."""
    started: list[subprocess.Popen[bytes]] = []

    def replace() -> None:
        for pid in live_processes(standalone.session_id):
            with suppress(FileNotFoundError, ProcessLookupError):
                if "triggerer" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        started.append(
            subprocess.Popen(
                ["bash", str(SCRIPT), "triggerer"],
                env=standalone.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    yield replace
    for process in started:
        process.terminate()
        process.wait()
        for pid in live_processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_and_the_triggerer_die_and_a_run_is_marked_failed(
    standalone: Standalone, next_triggerer: Callable[[], None]
) -> None:
    """Three runs at once: Airflow takes its time to find out about either death."""
    marked = PodRun.started(standalone, "waiting", "2026-03-03")
    killed = PodRun.started(standalone, "waiting", "2026-03-06")
    deferring = PodRun.started(standalone, "deferring", "2026-03-04")
    pods = freeze(marked, killed, deferring)
    assert [run.task["state"] for run in (marked, killed)] == ["running", "running"]
    deferring.wait_until_parked()
    old = deferring.task["triggerer_job"]["id"]
    num_told = sum("of 2 workers run" in line for line in deferring.log())
    kill_worker(killed.task["pid"])
    next_triggerer()

    marked.mark("failed")
    marked.wait(lambda: marked.is_ending(0, pods[0]), "the marked task's pods are stopped")
    for pod in pods[:2]:
        marked.thaw(pod)
    marked.check_nothing_left()

    def has_another_triggerer() -> bool:
        job = deferring.task["triggerer_job"]
        return job is not None and job["id"] != old

    def tells_again() -> bool:
        """Whether the trigger runs there: until then no process learns of a mark."""
        return sum("of 2 workers run" in line for line in deferring.log()) > num_told

    deferring.wait(has_another_triggerer, "another triggerer has the Job")
    deferring.wait(tells_again, "its trigger runs")
    assert [deferring.pod(worker) for worker in (0, 1)] == pods[4:]
    standalone.api("PATCH", deferring.path, json={"state": "failed"})
    deferring.wait(lambda: deferring.is_ending(1, pods[5]), "the pods are stopped")
    for pod in pods[4:]:
        deferring.thaw(pod)
    deferring.check_nothing_left()
    assert deferring.task["state"] == "failed"

    killed.wait_for("running", try_number=2)
    killed.wait(lambda: any("Adopted Job" in line for line in killed.log(2)), "its Job is adopted")
    assert [killed.pod(worker) for worker in (0, 1)] == pods[2:4]
    for pod in pods[2:4]:
        killed.thaw(pod)
    killed.check_success()
    assert [killed.num_resumed_parts(shard) for shard in (0, 1)] == [0, 0]  # no other pod did it
    assert marked.task["state"] == "failed"


# The end


def test_ctrl_c_ends_everything_also_a_task_that_is_running(standalone: Standalone) -> None:
    standalone.job.write_spec(
        "daily_snippets", engine={"extra_args": {"delay_s": 20.0}}, planner={"num_shards": 1}
    )
    standalone.job.write_rows(LAST_DAY)
    standalone.command("dags", "trigger", "daily_snippets", "--logical-date", LAST_DAY)
    wait_until(
        lambda: commands(standalone.session_id, "run"), "a shard is being generated", limit_s=RUNS_S
    )
    standalone.process.send_signal(signal.SIGINT)
    assert standalone.process.wait(timeout=60) == 130
    assert live_processes(standalone.session_id) == []
    with pytest.raises(httpx.ConnectError):
        standalone.log_in("any")


def commands(session_id: int, name: str) -> list[int]:
    """The processes of a session that are `batchllm NAME ...`."""
    found = []
    for pid in live_processes(session_id):
        with suppress(FileNotFoundError, ProcessLookupError):
            argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "batchllm_operator" in argv and name in argv:
                found.append(pid)
    return found


def test_it_starts_again_with_what_it_had(standalone: Standalone, tmp_path: Path) -> None:
    standalone.process.send_signal(signal.SIGINT)
    standalone.process.wait(timeout=60)
    env = {**standalone.env, "POOL_SLOTS": "3"}
    with Standalone.started(env, tmp_path / "output", standalone.job, standalone.cluster) as again:
        pool = again.api("GET", "/api/v2/pools/batchllm_gpu")
        assert (pool["slots"], pool["include_deferred"]) == (3, True)
        assert again.printed("paused") == "offline_ranking"
        assert again.printed("password") == standalone.printed("password")
