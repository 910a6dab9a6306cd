"""Traces of engine steps, from local files to the shard's run folder."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchllm_operator.artifacts.manifest import describe_file
from batchllm_operator.errors import StorageError
from batchllm_operator.lake import Folder

_log = logging.getLogger(__name__)


@contextmanager
def traced(folder: Folder) -> Iterator[Path]:
    """A local folder for traces; in the end, also with an error, they are published.

    Each becomes `trace-<UTC time>-<engine>-<digest>.parquet` in `folder`: one for each engine of
    each attempt. Those in a folder of their own have its name before that. A trace that can't be
    published costs a warning, not the run.
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
