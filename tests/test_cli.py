"""The command as a process: results, signals, and ending with its parent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import Batchllm
from support.demo_job import live_processes, wait_until
from support.fake_job import DS, document_rows, write_job, write_table
from support.fork_server import ForkServer

from batchllm_operator import cli, standard_streams
from batchllm_operator.child_processes import start_command
from batchllm_operator.errors import ExitCode, Interrupted
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import load_spec

CLI = "batchllm_operator"
COMMAND = [sys.executable, "-m", CLI]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A spec file for a job of 40 rows in 8 parts that takes a few seconds."""
    write_table(tmp_path / "documents", document_rows(8, 5))
    engine = {"extra_args": {"delay_s": 0.05}}
    return write_job(tmp_path, engine=engine, planner={"num_shards": 1})


def plan(job: Path) -> str:
    return plan_job(load_spec(job), DS).folder.uri


def run_parts(plan_uri: str) -> list[Path]:
    return sorted((Path(plan_uri) / "runs" / "shard-00000").glob("*/part-*.json"))


def test_the_commands_leave_versioned_results(job: Path) -> None:
    results: dict[str, Any] = {}
    of_plan = ["--job", str(job), "--ds", DS]
    for command in ("plan", "run", "commit", "report"):
        path = job.parent / f"{command}.json"
        line = [*COMMAND, command, *of_plan, "--result", str(path)]
        subprocess.run(line, check=True, timeout=60)
        results[command] = json.loads(path.read_text())
        assert results[command]["result_version"] == 1
        assert results[command]["command"] == command
        of_plan = ["--plan", results["plan"]["plan_uri"]]
    uri = results["plan"]["plan_uri"]
    assert results["run"]["num_rows"] == results["commit"]["num_rows_out"] == 40
    assert results["report"]["plan_uri"] == uri
    assert "sample_rows" not in results["report"], "rows never leave the lake in a result"


def test_a_stopped_run_keeps_whole_parts_and_goes_on(
    job: Path, batchllm: Batchllm, commands: ForkServer
) -> None:
    check_stop(job, signal.SIGTERM, batchllm, commands)


def check_stop(job: Path, how: signal.Signals, batchllm: Batchllm, commands: ForkServer) -> None:
    """Whole parts of a run that is stopped are kept, and the next run does the others."""
    uri = plan(job)
    with (job.parent / "stderr").open("w") as stderr:
        run = ["run", "--plan", uri]
        process = commands.start(CLI, run, stderr=stderr.fileno())
        wait_until(lambda: run_parts(uri), "the first part is written")
        process.send_signal(how)
        code = process.wait(timeout=30)
    said = (job.parent / "stderr").read_text()
    if how is signal.SIGKILL:
        assert code == -how
    else:
        assert code == 128 + how
        assert "give the same command again" in said and "Traceback" not in said
    kept = len(run_parts(uri))
    assert 1 <= kept < 8
    result = job.parent / "run.json"
    assert batchllm(*run, "--result", result).code == 0
    assert json.loads(result.read_text())["shard_idxs"] == [0]
    (report,) = Path(uri).glob("runs/*/report.json")
    assert json.loads(report.read_text())["num_resumed_parts"] == kept
    assert batchllm("commit", "--plan", uri).code == 0
    keys = pq.read_table(job.parent / "out")["row_key"].to_pylist()
    assert keys == [row["row_key"] for row in document_rows(8, 5)]


def test_a_command_stopped_among_its_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, "schema"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_first_process_of_a_container_stops_for_a_signal_that_comes_among_its_imports(
    tmp_path: Path,
) -> None:
    """The kernel drops signals that such a process neither handles nor blocks."""
    as_first = ["unshare", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*as_first, "true"]).returncode:
        pytest.skip("this machine or user can't make namespaces of processes")
    (tmp_path / "argparse.py").write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['argparse']\n"
        "import argparse\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*as_first, *COMMAND, "schema"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, ""), done.stderr


def test_two_signals_at_once_stop_a_command_without_a_complaint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    stops = (signal.SIGINT, signal.SIGTERM)
    with pytest.raises(Interrupted), cli._stopping_on_signals():
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        for number in stops:
            signal.raise_signal(number)  # for this thread; others don't block it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)  # both come before Python looks
    assert not complaints


class _Stopped:
    """Stops the class that it is made an attribute of, as a signal may while it is imported."""

    def __set_name__(self, owner: type, name: str) -> None:
        signal.raise_signal(signal.SIGTERM)


def _stop_a_class() -> None:
    type("Anything", (), {"attribute": _Stopped()})


def _stop_numpy() -> None:
    with suppress(Interrupted):
        signal.raise_signal(signal.SIGTERM)
    raise ImportError("numpy.core.multiarray failed to import")


@pytest.mark.parametrize("stop", [_stop_a_class, _stop_numpy])
def test_a_stop_of_an_import_is_a_stop_whatever_becomes_of_it(stop: Callable[[], None]) -> None:
    with pytest.raises(Interrupted), cli._stopping_on_signals():
        stop()


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_other_errors_stay(error: type[Exception]) -> None:
    with pytest.raises(error), cli._stopping_on_signals():
        raise error("there was no signal")


def test_a_child_command_stopped_as_it_starts_stops_in_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = start_command(["report", "--plan", "nowhere"])
    process.send_signal(signal.SIGINT)
    assert process.wait() == ExitCode.INTERRUPTED
    said = capfd.readouterr().err
    assert said.startswith("batchllm: ") and "Traceback" not in said
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this process gets signals again"


def test_a_signal_after_the_end_of_a_command_changes_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    finish = standard_streams.finish

    def stopped_late(code: int) -> int:
        signal.raise_signal(signal.SIGTERM)
        return finish(code)

    monkeypatch.setattr(standard_streams, "finish", stopped_late)
    try:
        assert cli.main(["schema"]) == ExitCode.OK
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert json.loads(capsys.readouterr().out)


def test_a_command_can_end_with_its_parent(job: Path) -> None:
    uri = plan(job)
    arguments = [*COMMAND, "run", "--plan", uri, "--die-with-parent"]
    code = f"import os, subprocess; subprocess.run([*{arguments!r}, str(os.getpid())])"
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_until(lambda: run_parts(uri), "the first part is written")
    assert len(live_processes(parent.pid)) == 2
    parent.kill()
    parent.wait()
    wait_until(lambda: not live_processes(parent.pid), "the command has ended too", 10.0)
    assert len(run_parts(uri)) < 8


def test_a_command_whose_parent_is_gone_already_does_not_start(
    job: Path, commands: ForkServer
) -> None:
    uri = plan(job)
    gone = ["--die-with-parent", str(2**22)]
    done = commands.run(CLI, ["run", "--plan", uri, *gone])
    assert done.returncode == ExitCode.FAILURE
    assert run_parts(uri) == []


def test_a_command_outlives_its_parent_unless_asked(job: Path) -> None:
    uri = plan(job)
    arguments = [*COMMAND, "run", "--plan", uri]
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({arguments!r})"])
    wait_until(lambda: len(run_parts(uri)) == 8, "the orphan has finished")


@pytest.mark.parametrize("what", ["spec", "report", "progress"])
def test_schemas_are_json(batchllm: Batchllm, what: str) -> None:
    schema = json.loads(batchllm("schema", *([] if what == "spec" else [what])).out)
    assert f"{what}_version" in schema["properties"]
    assert schema["additionalProperties"] is False


def test_a_report_is_written_where_it_is_asked_for(job: Path, batchllm: Batchllm) -> None:
    uri = plan(job)
    assert batchllm("run", "--plan", uri).code == 0
    assert batchllm("commit", "--plan", uri).code == 0
    page, result = job.parent / "page.html", job.parent / "result.json"
    outcome = batchllm("report", "--plan", uri, "--out", str(page))
    assert outcome.code == ExitCode.OK
    assert "saved tokens" in outcome.out
    assert page.read_text() == (Path(uri) / "report.html").read_text()
    outcome = batchllm("report", "--compare", uri, uri, "--out", str(page), "--result", str(result))
    assert outcome.code == ExitCode.OK
    assert "note: both are the same run" in outcome.out
    assert "Prompt tokens saved" in page.read_text()
    assert json.loads(result.read_text())["after"]["num_rows_in"] == 40


def test_help_lists_commands_and_exit_codes(batchllm: Batchllm) -> None:
    outcome = batchllm("--help")
    assert outcome.code == ExitCode.OK
    for words in ("Plan a job for one partition", "simulate", "Exit codes"):
        assert words in outcome.out
