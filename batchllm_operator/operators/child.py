"""Runs a command as a child process, logs its output, and never leaves it behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final

from batchllm_operator.errors import ERROR_MARK
from batchllm_operator.secrets import Masker

_POLL_S: Final = 0.2
_DRAIN_S: Final = 5.0  # for output left in the pipes when the command has ended


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """How a child process ended."""

    exit_code: int
    """As in a shell: 128 + signal number for a child that a signal ended."""
    error: str
    """The command's last error message, or its last line on stderr; may be empty."""
    stop_reason: str | None
    """Why it was asked to stop; None if it wasn't."""


class ChildProcess:
    """Runs one command and waits for it; `stop` may be called meanwhile.

    The child leads its own process group, so that a signal for this process isn't delivered to it
    twice and its own children can be ended with it. Its output is masked.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        kill_grace_s: float,
        masker: Masker | None = None,
    ) -> None:
        self._argv = tuple(argv)
        self._env = dict(env)
        self._masker = masker or Masker()
        self._kill_grace_s = kill_grace_s
        self._process: subprocess.Popen[str] | None = None
        self._kill_at_s: float | None = None
        self._stop_reason: str | None = None
        self._error = ""
        self._last_line = ""
        self._lines: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()

    def run(self, log: Callable[[str], None]) -> ChildOutcome:
        """Run the command, pass each line that it prints to `log`, and wait for its end.

        The child is stopped when this process's parent dies (Airflow's supervisor: the result would
        be lost), and when an exception is raised here, such as Airflow's task timeout. None of its
        processes is alive when this returns or raises.

        Raises:
            OSError: the command can't be started.
        """
        parent_pid = os.getppid()
        self._process = process = subprocess.Popen(
            self._argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            process_group=0,
        )
        readers = self._start_readers(process)
        try:
            self._wait(process, log, parent_pid)
        except BaseException as error:
            self.stop(type(error).__name__)
            self._wait(process, log, parent_pid)
            raise
        finally:
            if process.returncode != 0:  # its own children may still run
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for reader in readers:
                reader.join(_DRAIN_S)
        self._log_lines(log)
        code = process.returncode
        exit_code = 128 - code if code < 0 else code
        return ChildOutcome(exit_code, self._error or self._last_line, self._stop_reason)

    def stop(self, reason: str) -> None:
        """Ask the command to stop: SIGTERM now, SIGKILL from `run` after the grace period.

        Doesn't wait, so a signal handler may call it. Does nothing if no command is running, or if
        it was asked before.
        """
        process = self._process
        if process is None or process.returncode is not None or self._kill_at_s is not None:
            return
        self._stop_reason = reason
        self._kill_at_s = time.monotonic() + self._kill_grace_s
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)

    def _start_readers(self, process: subprocess.Popen[str]) -> list[threading.Thread]:
        def read(stream: IO[str], is_stderr: bool) -> None:  # only reads: `run` alone logs
            with stream:
                for line in stream:
                    self._lines.put((is_stderr, self._masker(line).rstrip()))

        streams = [(process.stdout, False), (process.stderr, True)]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        return readers

    def _wait(
        self, process: subprocess.Popen[str], log: Callable[[str], None], parent_pid: int
    ) -> None:
        """Log lines until the process has ended; kill it when its grace period is over."""
        while process.poll() is None:
            if os.getppid() != parent_pid:
                self.stop("the process that supervised this task has died")
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._log_lines(log, timeout_s=_POLL_S)

    def _log_lines(self, log: Callable[[str], None], timeout_s: float = 0.0) -> None:
        """Log what has been read, waiting up to `timeout_s` for the first line."""
        with suppress(queue.Empty):
            is_stderr, line = self._lines.get(timeout=timeout_s)
            while True:
                if line:
                    log(line)
                    if is_stderr:
                        self._last_line = line
                    if line.startswith(ERROR_MARK):
                        self._error = line.removeprefix(ERROR_MARK)
                is_stderr, line = self._lines.get_nowait()
