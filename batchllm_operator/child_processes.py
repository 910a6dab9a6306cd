"""Processes that end with their parent, and `batchllm` commands that a command starts."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


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
    arguments: Sequence[object], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `batchllm ARGUMENTS`, which the kernel ends with this process.

    The command leads a process group, so that Ctrl-C reaches it once, from here. SIGINT and SIGTERM
    are blocked until it can stop in order (`cli`): Python would print a traceback before. It has
    the variables of `environment` beside those of this process.
    """
    command = [sys.executable, "-P", "-m", "batchllm_operator", *map(str, arguments)]
    command += ["--die-with-parent", str(os.getpid())]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        return subprocess.Popen(command, env={**os.environ, **(environment or {})}, process_group=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def exit_code(status: int) -> int:
    """The exit code, as in a shell, for the status of a process."""
    return status if status >= 0 else 128 - status
