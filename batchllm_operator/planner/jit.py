"""The one way in which this package compiles its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a loop over numpy arrays to machine code at its first call.

    The code is cached on disk beside the module or in the user's cache folder, so later
    processes start without compiling; where neither can be written (a container with a
    read-only file system), each process compiles. Integers are 64 bits wide and wrap;
    indexes aren't checked. Other threads of Python run meanwhile.
    """
    try:
        dispatcher = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache
        dispatcher = njit(nogil=True)(function)
    return cast("Callable[P, R]", dispatcher)
