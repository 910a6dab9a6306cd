"""Replaces a file only if it is unchanged (compare and swap), for commits to Parquet tables.

On S3 the storage compares: `If-Match` with the ETag that was read, `If-None-Match: *` if there was
no file. On local disk a lock keeps other writers of this package out; it ends with its process. On
other storages the last writer wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from batchllm_operator.errors import CommitUnknownError, StorageError
from batchllm_operator.storage.conditional_writes import CONDITION_FAILS, http_status
from batchllm_operator.storage.folder import Folder

_PART_BYTES: Final = 64 << 20  # of a single request, or of a part of a larger upload
_MOST_PARTS: Final = 10_000
_UPLOADS: Final = 4  # concurrent; each has a part in memory


class FileChangedError(Exception):
    """The file has changed since it was read; nothing was written."""


@contextmanager
def exclusive(folder: Folder, name: str) -> Iterator[None]:
    """Lock the local file `name` against replacement; on other storages do nothing.

    Raises:
        StorageError: the folder can't be created, or can't hold a lock.
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


def replace_file(folder: Folder, source: Path, name: str, *, etag: str | None) -> None:
    """Replace `name` by a copy of the local file `source`, in one step.

    The caller holds the folder's `exclusive` lock. `etag` is that of the file to replace; None if
    there is none.

    Raises:
        FileChangedError: on S3, the file has changed or appeared meanwhile.
        StorageError: the storage fails.
        CommitUnknownError: S3 gave no answer; the request may still arrive.
    """
    if not hasattr(folder.fs, "call_s3"):
        folder.publish_file(source, name)
        return
    from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

    condition = {"IfMatch": etag} if etag is not None else {"IfNoneMatch": "*"}
    try:
        _upload(folder, source, name, condition)
    except (OSError, BotoCoreError) as error:
        where = f"{folder.uri}/{name}"
        status = http_status(error)
        # 404, too, where a file was expected.
        if status in CONDITION_FAILS or (status == 404 and etag is not None):
            raise FileChangedError(f"{where}: {error}") from error
        is_refused = status is not None and status < 500
        kind = StorageError if is_refused else CommitUnknownError
        raise kind(f"{where}: {error}") from error


def _upload(folder: Folder, source: Path, name: str, condition: dict[str, str]) -> None:
    fs = folder.fs
    bucket, key, _ = fs.split_path(folder.full_path(name))
    target = {"Bucket": bucket, "Key": key}
    num_bytes = source.stat().st_size
    if num_bytes <= _PART_BYTES:
        fs.call_s3("put_object", **target, Body=source.read_bytes(), **condition)
        return
    target["UploadId"] = fs.call_s3("create_multipart_upload", **target)["UploadId"]
    try:
        parts = _upload_parts(fs, target, source, num_bytes)
    except BaseException:
        fs.call_s3("abort_multipart_upload", **target)
        raise
    # Not aborted if this fails: it may have succeeded with its answer lost.
    fs.call_s3("complete_multipart_upload", **target, MultipartUpload={"Parts": parts}, **condition)


def _upload_parts(
    fs: Any, target: dict[str, str], source: Path, num_bytes: int
) -> list[dict[str, Any]]:
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))

    def upload(number: int) -> dict[str, Any]:
        with source.open("rb") as file:
            file.seek((number - 1) * part_bytes)
            body = file.read(part_bytes)
        answer = fs.call_s3("upload_part", **target, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(_UPLOADS) as pool:
        return list(pool.map(upload, range(1, -(-num_bytes // part_bytes) + 1)))
