"""Compiles this package's loops over arrays; names of their types."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a loop over numpy arrays at its first call.

    The code is cached beside the module or in the user's cache folder, so later processes don't
    compile. If neither is writable (a container with a read-only file system), each process does.
    Integers are 64 bits wide and wrap; indexes aren't checked. Python's lock is released.
    """
    try:
        dispatcher = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache
        dispatcher = njit(nogil=True)(function)
    return cast("Callable[P, R]", dispatcher)
