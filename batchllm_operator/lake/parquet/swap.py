"""Replaces a file only if it is unchanged (compare and swap), for commits to Parquet tables.

On S3 the storage compares: `If-Match` with the ETag that was read, `If-None-Match: *` if there was
no file. On local disk a lock keeps other writers of this package out; it ends with its process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from batchllm_operator.errors import StorageError
from batchllm_operator.lake.publishing import RefusedCommit
from batchllm_operator.storage import Folder, s3


@contextmanager
def exclusive(folder: Folder, name: str) -> Iterator[None]:
    """Lock the local file `name` against replacement; on S3 do nothing.

    Raises `StorageError`: the folder can't be created, or can't hold a lock.
    """
    if not folder.is_local:
        yield
        return
    path = Path(folder.full_path(f".{name}.lock"))
    # Another kind of lock wouldn't end with its process.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise StorageError(f"{path}: can't be locked: {error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while locked, or another's would be removed
        lock.release()


def etag_of(file: Any) -> str | None:
    """The ETag of a file from `Folder.open_file`, to which its reads keep; None without ETags."""
    details = getattr(file, "details", None)
    return details.get("ETag") if isinstance(details, dict) else None


def replace_file(
    folder: Folder, source: Path, name: str, *, etag: str | None
) -> RefusedCommit | None:
    """Replace `name` by a copy of the local file `source`, in one step; None if that is done.

    The caller holds the folder's `exclusive` lock. `etag` is that of the file to replace; None if
    there is none.
    """
    from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

    try:
        if folder.is_local:
            folder.publish_file(source, name)
        else:
            s3.put_if(folder.fs, folder.full_path(name), source, etag)
        return None
    except StorageError as error:
        return RefusedCommit(str(error), error, may_repeat=False)
    except (OSError, BotoCoreError) as error:
        text, status = f"{folder.uri}/{name}: {error}", s3.http_status(error)
        # 404, too, where a file was expected.
        if s3.is_unmet(error) or (status == 404 and etag is not None):
            return RefusedCommit(text, error)
        is_answered = status is not None and status < 500
        return RefusedCommit(text, error, may_arrive=not is_answered, may_repeat=False)
