"""Runs a `batchllm` command for an operator: arguments in, versioned result JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, NoReturn

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import BaseOperator, Context, XComArg

from batchllm_operator.errors import FINAL_EXIT_CODES, ExitCode
from batchllm_operator.operators.child import ChildProcess
from batchllm_operator.operators.credentials import Credentials

RESULT_VERSION: Final = 1

# -P: the working directory must not shadow packages (kernels/ would shadow Hugging Face's).
_COMMAND: Final = (sys.executable, "-P", "-m", "batchllm_operator")


class BatchLLMCommandOperator(BaseOperator):
    """Base of the operators that run `batchllm` commands in the worker.

    The command's output goes into the task's log. When the task is killed, times out or loses its
    supervisor, the command gets SIGTERM, and SIGKILL after `kill_grace_s` seconds; when the task
    itself is killed by SIGKILL, the kernel ends the command.

    Args:
        env: environment variables for the command, on top of the task's own (templated).
            Airflow stores and shows them: no place for secrets.
        aws_conn_id: Airflow connection of type `aws` whose credentials, region and endpoint
            the command gets as `AWS_*` variables, which win over others (templated).
        connection_env: environment variables that are fields of Airflow connections, such as
            `{"TOKEN": "catalog.password"}` (templated); see `Credentials.of`.
    """

    template_fields: Sequence[str] = ("env", "aws_conn_id", "connection_env")
    template_fields_renderers: ClassVar[dict[str, str]] = {"env": "json", "connection_env": "json"}
    ui_color = "#d7e8f4"

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        aws_conn_id: str | None = None,
        connection_env: Mapping[str, str] | None = None,
        kill_grace_s: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.env, self.aws_conn_id, self.connection_env = env, aws_conn_id, connection_env
        self.kill_grace_s = kill_grace_s
        self._child: ChildProcess | None = None

    def credentials(self) -> Credentials:
        """What the named connections hold; `AirflowFailException` if one is wrong."""
        return Credentials.of(self.aws_conn_id, self.connection_env)

    def run_command(self, command: str, *arguments: str) -> dict[str, Any]:
        """Run `batchllm <command> <arguments>` and return its result.

        Raises:
            AirflowFailException: a retry won't help: a connection, the spec, the table or the plan
                is wrong, too many rows failed, or the command speaks another result version.
            AirflowException: the command failed in any other way, or was stopped.
        """
        is_json = [False, *(argument == "--job-json" for argument in arguments)]
        shown = ("..." if hides else text for text, hides in zip(arguments, is_json, strict=False))
        self.log.info("Running batchllm %s", " ".join((command, *shown)))
        result = self._run(command, arguments, self.log.info)
        return _raise_failure(command, result) if isinstance(result, ChildProcess) else result

    def run_verify(self, *arguments: str) -> dict[str, Any] | str:
        """Run `batchllm verify`: returns the result, or a text on what is missing.

        Output is logged only if the command fails; then it raises as `run_command`.
        """
        lines: list[str] = []
        result = self._run("verify", arguments, lines.append)
        if not isinstance(result, ChildProcess):
            return result
        if result.exit_code == ExitCode.INCOMPLETE and result.stop_reason is None:
            return result.error
        for line in lines:
            self.log.info(line)
        _raise_failure("verify", result)

    def _run(
        self, command: str, arguments: Sequence[str], log: Callable[[str], None]
    ) -> dict[str, Any] | ChildProcess:
        """The command's result, or the process that has failed."""
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
            return _read_result(path, command) if child.exit_code == ExitCode.OK else child

    def on_kill(self) -> None:
        if self._child is not None:
            self.log.warning("The task is being killed; stopping the command")
            self._child.stop("the task was killed")
        super().on_kill()


class BatchLLMReportOperator(BatchLLMCommandOperator):
    """Logs the summary of a committed plan, and returns the report's URIs and counts.

    Runs `batchllm report --plan <plan_uri>` (a templated URI, or the XCom that holds it), which
    writes at most the report's page. If it fails, the partition stays published.
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
    result = json.loads(path.read_bytes()) if path.exists() else {}
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
