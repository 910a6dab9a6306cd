"""`batchllm` commands that a command starts as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence


def start_command(
    arguments: Sequence[object], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `batchllm ARGUMENTS`, which the kernel ends with this process.

    The command leads a process group, so that Ctrl-C reaches it once, from here. SIGINT and SIGTERM
    are blocked until it can stop in order (`cli`): Python would print a traceback before.

    Args:
        environment: variables beside those of this process.
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
