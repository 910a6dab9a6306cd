"""Traces of engine steps, from local files to the shard's run folder."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchllm_operator.errors import StorageError
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import describe_file

_log = logging.getLogger(__name__)


@contextmanager
def traced(folder: Folder) -> Iterator[Path]:
    """A local folder for traces, which are published at the end, even after an error.

    Each becomes `trace-<UTC time>-<engine>-<digest>.parquet` in `folder`, one per engine and
    attempt, prefixed with the name of its subfolder if it has one. A trace that can't be published
    leads to a warning only.
    """
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    with tempfile.TemporaryDirectory(prefix="batchllm-trace-") as local:
        try:
            yield Path(local)
        finally:
            for path in sorted(Path(local).rglob("*.parquet")):
                digest = describe_file(path).sha256[:8]
                number = path.stem.rpartition("-")[2]
                whose = "".join(f"{name}-" for name in path.relative_to(local).parts[:-1])
                try:
                    folder.publish_file(path, f"{whose}trace-{began}-{number}-{digest}.parquet")
                except StorageError as error:
                    _log.warning("a trace of the engine's steps is lost: %s", error)
