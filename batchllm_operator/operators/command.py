"""Runs a `batchllm` command for an operator: arguments in, versioned result JSON out."""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, NoReturn

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import BaseOperator, Context, XComArg

from batchllm_operator.child_processes import exit_code
from batchllm_operator.errors import ERROR_MARK, FINAL_EXIT_CODES, ExitCode
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.secrets import Masker

RESULT_VERSION: Final = 1
_POLL_S: Final = 0.2

# -P: the working directory must not shadow packages (kernels/ would shadow Hugging Face's).
_COMMAND: Final = (sys.executable, "-P", "-m", "batchllm_operator")


class ChildProcess:
    """Runs one command, once, and waits for it; `stop` may be called meanwhile.

    The child leads its own process group, so that a signal for this process isn't delivered to it
    twice and its own children can be ended with it. Its output is masked. Once it has ended,
    `exit_code` is as in a shell (128 + signal number), `error` the command's last error message, or
    its last line, and `stop_reason` why it was asked to stop, or None.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], kill_grace_s: float, masker: Masker
    ) -> None:
        self._argv, self._env = tuple(argv), dict(env)
        self._kill_grace_s, self._masker = kill_grace_s, masker
        self._parent_pid = os.getppid()
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at_s: float | None = None
        self._unfinished_line, self._has_error = b"", False
        self.exit_code, self.error = 0, ""
        self.stop_reason: str | None = None

    def run(self, log: Callable[[str], None]) -> None:
        """Run the command, pass each line that it prints to `log`, and wait for its end.

        The child is stopped when this process's parent dies (Airflow's supervisor), and when an
        exception is raised here, such as Airflow's task timeout. None of its processes is alive
        when this returns or raises.
        """
        self._process = process = subprocess.Popen(
            self._argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert process.stdout is not None
        with process.stdout as output:
            try:
                self._follow(process, output.fileno(), log)
            except BaseException as error:
                self.stop(type(error).__name__)
                self._follow(process, output.fileno(), log)
                raise
            finally:
                if process.returncode != 0:  # its own children may still run
                    _kill_group(process.pid)
                    process.wait()
        self._log_line(self._unfinished_line, log)
        self.exit_code = exit_code(process.returncode)

    def stop(self, reason: str) -> None:
        """Ask the command to stop: SIGTERM now, SIGKILL from `run` after the grace period.

        Doesn't wait, so a signal handler may call it. Only the first call does anything.
        """
        process = self._process
        if process is None or process.returncode is not None or self._kill_at_s is not None:
            return
        self.stop_reason = reason
        self._kill_at_s = time.monotonic() + self._kill_grace_s
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)

    def _follow(
        self, process: subprocess.Popen[bytes], output: int, log: Callable[[str], None]
    ) -> None:
        """Log lines until the process has ended; kill it when its grace period is over."""
        reading = select.poll()
        reading.register(output, select.POLLIN)
        while True:
            has_ended = process.poll() is not None
            if os.getppid() != self._parent_pid:
                self.stop("the process that supervised this task has died")
            if not has_ended and time.monotonic() >= (self._kill_at_s or math.inf):
                _kill_group(process.pid)
            wait_s = 0.0 if has_ended else _POLL_S
            data = os.read(output, 1 << 16) if reading.poll(wait_s * 1000) else b""
            *lines, self._unfinished_line = re.split(rb"[\r\n]", self._unfinished_line + data)
            for line in lines:
                self._log_line(line, log)
            if has_ended and not data:
                return
            if not data:
                time.sleep(_POLL_S / 20)  # it may have closed its output

    def _log_line(self, line: bytes, log: Callable[[str], None]) -> None:
        if text := self._masker(line.decode("utf-8", "replace")).rstrip():
            log(text)
            if text.startswith(ERROR_MARK) or not self._has_error:
                self._has_error = text.startswith(ERROR_MARK)
                self.error = text.removeprefix(ERROR_MARK)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class BatchLLMCommandOperator(BaseOperator):
    """Base of the operators that run `batchllm` commands in the worker.

    The command's output goes into the task's log. When the task is killed, times out or loses its
    supervisor, the command gets SIGTERM, and SIGKILL after `kill_grace_s` seconds; when the task
    itself is killed by SIGKILL, the kernel ends the command.

    Args:
        env: environment variables for the command, on top of the task's own (templated).
            Airflow stores and shows them: no place for secrets.
        lake_conn_id: Airflow connection of type `aws`, `google_cloud_platform`, `wasb` or `adls`
            whose credentials, region and endpoint the command gets as variables of its clients,
            such as `AWS_*`, which win over others (templated).
        connection_env: environment variables that are fields of Airflow connections, such as
            `{"TOKEN": "catalog.password"}` (templated); see `Credentials.of`.
    """

    template_fields: Sequence[str] = ("env", "lake_conn_id", "connection_env")
    template_fields_renderers: ClassVar[dict[str, str]] = {"env": "json", "connection_env": "json"}
    ui_color = "#d7e8f4"
    _child: ChildProcess | None = None
    _killed_at: float | None = None
    _result: Mapping[str, Any] = {}
    """That of the last command; of one that has failed, what it tells of that."""

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        lake_conn_id: str | None = None,
        connection_env: Mapping[str, str] | None = None,
        kill_grace_s: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.env, self.lake_conn_id, self.connection_env = env, lake_conn_id, connection_env
        self.kill_grace_s = kill_grace_s

    def credentials(self) -> Credentials:
        return Credentials.of(self.lake_conn_id, self.connection_env)

    def run_command(self, command: str, *arguments: str) -> dict[str, Any]:
        """Run `batchllm <command> <arguments>` and return its result.

        Raises `AirflowException` if it fails or is stopped, `AirflowFailException` if no retry
        mends that, such as a wrong spec or table, or too many failed rows.
        """
        is_json = [False, *(argument == "--job-json" for argument in arguments)]
        shown = ("..." if hides else text for text, hides in zip(arguments, is_json, strict=False))
        self.log.info("Running batchllm %s", " ".join((command, *shown)))
        result, child = self._run(command, arguments, self.log.info)
        return _raise_failure(command, child) if result is None else result

    def run_verify(self, *arguments: str) -> dict[str, Any] | str:
        """Run `batchllm verify`, which logs only its failures: the result, or what is missing."""
        lines: list[str] = []
        result, child = self._run("verify", arguments, lines.append)
        if result is not None:
            return result
        if child.exit_code == ExitCode.INCOMPLETE and child.stop_reason is None:
            return child.error
        for line in lines:
            self.log.info(line)
        _raise_failure("verify", child)

    def _run(
        self, command: str, arguments: Sequence[str], log: Callable[[str], None]
    ) -> tuple[dict[str, Any] | None, ChildProcess]:
        """The command's result, None if it has failed, and its process."""
        credentials = self.credentials()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **(self.env or {})}
        with TemporaryDirectory(prefix="batchllm-") as folder:
            path = Path(folder) / "result.json"
            own = ("--result", str(path), "--die-with-parent", str(os.getpid()))
            child = self._child = ChildProcess(
                (*_COMMAND, command, *arguments, *own),
                env=credentials.added_to(env),
                masker=credentials.masker,
                kill_grace_s=self.kill_grace_s,
            )
            child.run(log)
            has_failed = child.exit_code != ExitCode.OK
            told = None if has_failed and not path.exists() else _read_result(path, command)
        self._result = told or {}
        return None if has_failed else told, child

    def on_kill(self) -> None:
        """Note it, in a signal handler: what `execute` waits for then ends."""
        self._killed_at = self._killed_at or time.monotonic()
        if self._child is not None:
            self._child.stop("the task was killed")
        super().on_kill()


class BatchLLMReportOperator(BatchLLMCommandOperator):
    """Logs the summary of a committed plan, and returns the report's URIs and counts.

    `batchllm report --plan <plan_uri>` (a templated URI, or the XCom that holds it) writes at most
    the report's page. If it fails, the partition stays published.
    """

    template_fields: Sequence[str] = ("plan_uri", *BatchLLMCommandOperator.template_fields)
    ui_color = "#f1ecc9"

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    def execute(self, context: Context) -> dict[str, str | int | float]:
        return uris_and_counts(self.run_command("report", "--plan", str(self.plan_uri)))


def uris_and_counts(result: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The numbers and URIs of a result, for an XCom; no other texts, nothing nested."""
    return {
        name: value
        for name, value in result.items()
        if (isinstance(value, int | float) and name != "result_version")
        or (isinstance(value, str) and name.endswith("_uri"))
    }


def _read_result(path: Path, command: str) -> dict[str, Any]:
    """What the command wrote; `AirflowFailException` if the installed releases don't fit."""
    result: Any = {}
    with suppress(FileNotFoundError, ValueError):  # no file, or no JSON
        result = json.loads(path.read_bytes())
    if (version := result.get("result_version")) != RESULT_VERSION:
        raise AirflowFailException(
            f"batchllm {command} ended well with a result of version {version}; these operators"
            f" read version {RESULT_VERSION}: was another release of batchllm-operator installed"
            " while the task ran?"
        )
    return dict(result)


def _raise_failure(command: str, child: ChildProcess) -> NoReturn:
    if child.stop_reason is not None:
        raise AirflowException(
            f"batchllm {command} was stopped: {child.stop_reason}; finished parts are kept"
        )
    is_final = child.exit_code in FINAL_EXIT_CODES
    raise (AirflowFailException if is_final else AirflowException)(
        f"batchllm {command}: {child.error or 'no message'} (exit code {child.exit_code})"
    )
