"""The plan stage's scratch directory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from batchllm_operator.errors import StorageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def open_scratch() -> Iterator[Path]:
    """A new folder under `TMPDIR`, removed with its contents at the end of the context.

    Raises:
        StorageError: in place of the `OSError` of a full disk; says how to use another.
    """
    with tempfile.TemporaryDirectory(prefix="batchllm-plan-") as scratch:
        try:
            yield Path(scratch)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StorageError(
                f"{scratch}: no room for the plan's temporary files"
                f" ({os.strerror(error.errno)}); they have been removed; free some space, or set"
                " TMPDIR to a folder on a larger disk"
            ) from error
