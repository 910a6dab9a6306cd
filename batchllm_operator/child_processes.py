"""Processes that end with their parent, and `batchllm` commands that a command starts."""

import codecs
import ctypes
import os
import pty
import select
import signal
import subprocess
import sys
import tty
from collections.abc import Mapping, Sequence
from typing import Final

from batchllm_operator.errors import (
    ERROR_MARK,
    BatchLLMError,
    ConflictError,
    FailedRowsError,
    InvalidError,
    LimitError,
)

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.2
_MOST_SAID: Final = 1 << 16
_KINDS: Final[Mapping[int, type[BatchLLMError]]] = {
    kind.exit_code: kind for kind in (InvalidError, FailedRowsError, ConflictError, LimitError)
}


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent, a thread, ends, even by SIGKILL (Linux).

    Raises `ProcessLookupError` if the parent has ended before, and OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"process {parent_pid} isn't the parent (any more)")


def start_command(
    arguments: Sequence[object],
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `batchllm ARGUMENTS`, which the kernel ends with this process.

    The command leads a process group, so that Ctrl-C reaches it once, from here. SIGINT and SIGTERM
    are blocked until it can stop in order (`cli`): Python would print a traceback before. It has
    the variables of `environment` beside those of this process, whose streams are the default.
    """
    command = [sys.executable, "-P", "-m", "batchllm_operator", *map(str, arguments)]
    command += ["--die-with-parent", str(os.getpid())]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        variables = {**os.environ, **(environment or {})}
        return subprocess.Popen(
            command, env=variables, process_group=0, stdout=stdout, stderr=stderr
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_command(arguments: Sequence[object], environment: Mapping[str, str]) -> None:
    """Run `batchllm ARGUMENTS` to its end; what it prints on stderr goes to `sys.stderr`.

    For a terminal and for a notebook it draws progress bars. An exception here, such as Ctrl-C,
    stops the command in order, and a second one kills it; both are raised.

    Raises `BatchLLMError`, of the class that the exit code stands for, with the command's error.
    """
    has_bars = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    reading, writing = pty.openpty() if has_bars else os.pipe()
    try:
        try:
            if has_bars:
                tty.setraw(writing)  # leaves the ends of lines as they are
            process = start_command(
                arguments, environment, stdout=subprocess.DEVNULL, stderr=writing
            )
        finally:
            os.close(writing)
        try:
            said = _print_all(process, reading)
        except BaseException:  # whatever ends this: the command must not go on alone
            process.send_signal(signal.SIGINT)
            _print_all(process, reading)
            raise
        finally:
            process.kill()  # unless it has ended
            status = process.wait()
    finally:
        os.close(reading)
    if status:
        raise _failure(exit_code(status), said)


def _print_all(process: subprocess.Popen[bytes], reading: int) -> str:
    """Print what a process writes until it ends; returns the last of it."""
    decoder, said = codecs.getincrementaldecoder("utf-8")("replace"), ""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while True:
        if not poll.poll(1000 * _POLL_S):
            if process.poll() is not None:  # a process that it has left behind may still write
                return said
            continue
        try:
            data = os.read(reading, 1 << 16)
        except OSError:  # a terminal that no process holds any more
            data = b""
        if not data:
            process.wait()
            return said
        text = decoder.decode(data)
        print(text, end="", file=sys.stderr, flush=True)
        said = (said + text)[-_MOST_SAID:]


def _failure(code: int, said: str) -> BatchLLMError:
    error = said.rpartition(ERROR_MARK)[2] if ERROR_MARK in said else ""
    reason = error.partition("\n")[0] or f"the command ended with exit code {code}"
    return _KINDS.get(code, BatchLLMError)(reason)


def exit_code(status: int) -> int:
    """The exit code, as in a shell, for the status of a process."""
    return status if status >= 0 else 128 - status
