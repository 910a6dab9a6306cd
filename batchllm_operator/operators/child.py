"""Runs a command as a child process, logs its output, and never leaves it behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from batchllm_operator.errors import ERROR_MARK
from batchllm_operator.secrets import Masker

_POLL_S: Final = 0.2


class ChildProcess:
    """Runs one command, once, and waits for it; `stop` may be called meanwhile.

    The child leads its own process group, so that a signal for this process isn't delivered to it
    twice and its own children can be ended with it. Its output is masked.

    Attributes, once it has ended:
        exit_code: as in a shell (128 + signal number).
        error: the command's last error message, or its last line.
        stop_reason: why it was asked to stop, or None.
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

        The child is stopped when this process's parent dies (Airflow's supervisor: the result would
        be lost), and when an exception is raised here, such as Airflow's task timeout. None of its
        processes is alive when this returns or raises; `OSError` if it can't be started.
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
                self._wait(process, output.fileno(), log)
            except BaseException as error:
                self.stop(type(error).__name__)
                self._wait(process, output.fileno(), log)
                raise
            finally:
                if process.returncode != 0:  # its own children may still run
                    _kill_group(process.pid)
                    process.wait()
            while self._log_lines(output.fileno(), log):
                pass
        self._log_line(self._unfinished_line, log)
        code = process.returncode
        self.exit_code = 128 - code if code < 0 else code

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

    def _wait(
        self, process: subprocess.Popen[bytes], output: int, log: Callable[[str], None]
    ) -> None:
        """Log lines until the process has ended; kill it when its grace period is over."""
        while process.poll() is None:
            if os.getppid() != self._parent_pid:
                self.stop("the process that supervised this task has died")
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                _kill_group(process.pid)
            if not self._log_lines(output, log, _POLL_S):
                time.sleep(_POLL_S / 20)  # it may have closed its output

    def _log_lines(self, output: int, log: Callable[[str], None], wait_s: float = 0.0) -> bool:
        """Log what the command has printed; false if it prints nothing for `wait_s`."""
        reading = select.poll()
        reading.register(output, select.POLLIN)
        data = os.read(output, 1 << 16) if reading.poll(wait_s * 1000) else b""
        *lines, self._unfinished_line = re.split(rb"[\r\n]", self._unfinished_line + data)
        for line in lines:
            self._log_line(line, log)
        return bool(data)

    def _log_line(self, line: bytes, log: Callable[[str], None]) -> None:
        if text := self._masker(line.decode("utf-8", "replace")).rstrip():
            log(text)
            if text.startswith(ERROR_MARK) or not self._has_error:
                self._has_error = text.startswith(ERROR_MARK)
                self.error = text.removeprefix(ERROR_MARK)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
