import json
import os
import signal
import sys
from pathlib import Path

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from batchllm_operator.errors import ExitCode
from batchllm_operator.operators import command
from batchllm_operator.operators.command import (
    BatchLLMCommandOperator,
    uris_and_counts,
)

# Stands in for the command line: writes what RESULT holds, prints, exits as it is told.
STAND_IN = """
import json, os, sys
arguments = sys.argv[1:]
if os.environ.get("RESULT"):
    open(arguments[arguments.index("--result") + 1], "w").write(os.environ["RESULT"])
print(json.dumps(arguments))
if os.environ.get("ERROR"):
    print("batchllm: error: " + os.environ["ERROR"], file=sys.stderr)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(command, "_COMMAND", (sys.executable, str(script)))


def operator(**env: str) -> BatchLLMCommandOperator:
    return BatchLLMCommandOperator(task_id="task", env=env)


def result_json(**fields: object) -> str:
    return json.dumps({"result_version": 1, "command": "plan", **fields})


def test_result_is_returned_and_lines_are_logged(
    stand_in: None, capfd: pytest.CaptureFixture[str]
) -> None:
    task = operator(RESULT=result_json(plan_uri="s3://b/p", num_shards=2))
    result = task.run_command("plan", "--job", "a b.yaml")
    assert result == {
        "result_version": 1,
        "command": "plan",
        "plan_uri": "s3://b/p",
        "num_shards": 2,
    }
    logged = "".join(capfd.readouterr())
    assert '["plan", "--job", "a b.yaml", "--result"' in logged
    assert f'"--die-with-parent", "{os.getpid()}"]' in logged


@pytest.mark.parametrize("code", [*sorted(set(ExitCode) - {ExitCode.OK}), 137])
def test_an_exit_code_decides_whether_a_retry_may_help(stand_in: None, code: int) -> None:
    with pytest.raises(
        AirflowException, match=rf"plan: the disk is full \(exit code {code}\)"
    ) as e:
        operator(CODE=str(int(code)), ERROR="the disk is full").run_command("plan")
    is_final = code in (ExitCode.INVALID, ExitCode.REFUSED, ExitCode.CONFLICT, ExitCode.LIMIT)
    assert isinstance(e.value, AirflowFailException) == is_final


@pytest.mark.parametrize(
    ("result", "version"), [("", None), ("no JSON", None), ('{"result_version": 2}', 2)]
)
def test_a_result_of_another_release_is_refused(
    stand_in: None, result: str, version: int | None
) -> None:
    with pytest.raises(AirflowFailException, match=f"result of version {version}; these operators"):
        operator(RESULT=result).run_command("plan")


def test_result_versions_of_both_sides_agree() -> None:
    from batchllm_operator import cli

    assert command.RESULT_VERSION == cli.RESULT_VERSION


def test_only_uris_and_counts_leave_a_task() -> None:
    result = {
        "result_version": 1,
        "command": "commit",
        "table_uri": "s3://b/t",
        "num_rows_in": 3,
        "saving_ratio": 0.5,
        "model": "m",
        "errors_by_kind": {"x": 1},
        "sample_rows": [{"generated_text": "secret"}],
    }
    assert uris_and_counts(result) == {
        "table_uri": "s3://b/t",
        "num_rows_in": 3,
        "saving_ratio": 0.5,
    }


def test_on_kill_stops_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Airflow does it: a SIGTERM handler calls on_kill while execute waits."""
    script = tmp_path / "stand_in.py"
    script.write_text("import os, signal; os.kill(os.getppid(), signal.SIGUSR1); signal.pause()")
    monkeypatch.setattr(command, "_COMMAND", (sys.executable, str(script)))
    task = operator()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: task.on_kill())
    try:
        with pytest.raises(AirflowException, match="stopped: the task was killed") as caught:
            task.run_command("run")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not isinstance(caught.value, AirflowFailException)


def test_on_kill_before_and_after_a_command_does_nothing(stand_in: None) -> None:
    task = operator(RESULT=result_json())
    task.on_kill()
    assert task.run_command("plan")
    task.on_kill()
