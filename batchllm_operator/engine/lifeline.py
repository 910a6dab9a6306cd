"""Ends a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends, even by SIGKILL (Linux).

    The parent is the thread that started this process.

    Raises:
        OSError: the kernel refuses.
        ProcessLookupError: the parent ended before the kernel could watch it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"process {parent_pid} isn't the parent (any more)")
