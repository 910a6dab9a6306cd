"""What S3 needs besides its file system: settings for clients, and conditional writes (of other
stores, too)."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import fsspec

from batchllm_operator.errors import MissingLibraryError, SpecError, StorageError

_TIMEOUTS: Final = {"connect_timeout": 10, "read_timeout": 30}
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_PART_BYTES: Final = 64 << 20  # of a single request, or of a part of a larger upload
_MOST_PARTS: Final = 10_000
_UPLOADS: Final = 4  # concurrent; each has a part in memory

Condition = Literal["IfNoneMatch", "IfMatch"]
_UNMET: Final[dict[Condition, tuple[str, str]]] = {
    "IfNoneMatch": ("If-None-Match", "*"),
    "IfMatch": ("If-Match", '"00000000000000000000000000000000"'),
}
"""The header, and a value that doesn't hold for the file that is there."""
_STATUSES: Final = {errno.EEXIST: 412, errno.EBUSY: 412, errno.EACCES: 403}
"""Of errors of `clouds.ObjectStore`."""
_log = logging.getLogger(__name__)
_proven: set[tuple[str | None, str, Condition]] = set()
"""Endpoint, bucket and condition."""


def s3_options(uri: str) -> dict[str, Any]:
    """File system options for an S3 URI: timeouts, and fsspec's own configuration; else none.

    Retries are botocore's: 5 requests, unless the environment or the AWS profile says otherwise.
    Raises `SpecError`: the endpoint in the environment isn't valid; `MissingLibraryError`.
    """
    scheme = uri.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        return {}
    _check_endpoint()
    try:
        import s3fs  # noqa: F401 - of the extra `s3`
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, uri) from error
    return {
        "config_kwargs": _TIMEOUTS | fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
    }


def storage_errors() -> tuple[type[Exception], ...]:
    """What fsspec and s3fs raise; to be called in an `except`, as botocore is slow to import."""
    try:
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError:  # without the extra `s3` nothing raises it
        return (OSError,)
    return (OSError, BotoCoreError)


def _check_endpoint() -> None:
    """Refuse an invalid endpoint before a client does, whose message would repeat it."""
    for name in _ENDPOINTS:
        if not (value := os.environ.get(name)):
            continue
        try:
            parts = urlsplit(value)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_url = is_url and (parts.port is None or parts.port > 0)
        except ValueError:
            is_url = False
        if not is_url or "@" in value:
            raise SpecError(f"{name}: must be http(s)://HOST[:PORT], without credentials")


def check_honours(fs: Any, folder: str, *conditions: Condition) -> None:
    """Try conditional writes to a small file in a folder of S3, which is removed.

    Some stores accept `If-None-Match` and `If-Match` and ignore them: two workers would then hold
    one claim, and two commits overwrite each other. A bucket is tried once in a process. If the
    folder can't be written, nothing is known: plans may be made with fewer rights than commits.
    Google's and Azure's stores are known to honour them.
    """
    if not hasattr(fs, "call_s3"):
        return
    from botocore.exceptions import BotoCoreError  # slow to import

    path = f"{folder}/_probe-{uuid.uuid4().hex}"
    bucket, key, _ = fs.split_path(path)
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    unknown = [name for name in conditions if (endpoint, bucket, name) not in _proven]
    if not unknown:
        return
    target: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": b""}
    try:
        fs.call_s3("put_object", **target)
        try:
            for condition in unknown:
                if (how := _breach(fs, target, condition)) is not None:
                    raise StorageError(
                        f"s3://{folder}: the S3 store of bucket {bucket!r} {how} conditional writes"
                        f" ({_UNMET[condition][0]}), so concurrent workers and commits would"
                        " overwrite each other; use a store that honours them, as AWS S3, MinIO"
                        " and R2 do, or a newer version of this one"
                    )
                _proven.add((endpoint, bucket, condition))
        finally:
            with suppress(OSError, BotoCoreError):  # not all may delete; readers skip the file
                fs.rm_file(path)
    except (OSError, BotoCoreError) as error:
        _log.debug("s3://%s: conditional writes can't be tried: %s", folder, error)


def _breach(fs: Any, target: dict[str, Any], condition: Condition) -> str | None:
    """What the store does with a condition that doesn't hold, in place of refusing the write."""
    try:
        fs.call_s3("put_object", **target, **{condition: _UNMET[condition][1]})
        return "ignores"
    except OSError as error:
        if is_unmet(error):
            return None
        if http_status(error) not in (400, 501):
            raise
        return "doesn't know"


def http_status(error: BaseException) -> int | None:
    """The status of the store's answer that an error stands for; None if none came."""
    status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else _STATUSES.get(getattr(error, "errno", None) or 0)


def is_unmet(error: BaseException) -> bool:
    """Whether the condition of a write didn't hold, or another write was under way."""
    return http_status(error) in (409, 412)


def is_conflict(error: BaseException) -> bool:
    """Whether another conditional write to the same name was under way."""
    return bool(_answer(error).get("Error", {}).get("Code") == "ConditionalRequestConflict")


def _answer(error: BaseException) -> dict[str, Any]:
    return getattr(error.__cause__, "response", None) or {}


def put_if(fs: Any, path: str, source: Path, etag: Any) -> None:
    """Copy the local file `source` to `path` if that has the ETag; if there is no file, for None.

    Raises `OSError`, `BotoCoreError`: it failed; see `is_unmet`.
    """
    if not hasattr(fs, "call_s3"):
        fs.put_if(path, source, etag)
        return
    condition = {"IfMatch": etag} if etag is not None else {"IfNoneMatch": "*"}
    bucket, key, _ = fs.split_path(path)
    target = {"Bucket": bucket, "Key": key}
    num_bytes = source.stat().st_size
    if num_bytes <= _PART_BYTES:
        fs.call_s3("put_object", **target, Body=source.read_bytes(), **condition)
        return
    target["UploadId"] = fs.call_s3("create_multipart_upload", **target)["UploadId"]
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))

    def upload(number: int) -> dict[str, Any]:
        with source.open("rb") as file:
            file.seek((number - 1) * part_bytes)
            body = file.read(part_bytes)
        answer = fs.call_s3("upload_part", **target, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with ThreadPoolExecutor(_UPLOADS) as pool:
            parts = list(pool.map(upload, range(1, -(-num_bytes // part_bytes) + 1)))
    except BaseException:
        fs.call_s3("abort_multipart_upload", **target)
        raise
    # Not aborted if this fails: it may have succeeded with its answer lost.
    fs.call_s3("complete_multipart_upload", **target, MultipartUpload={"Parts": parts}, **condition)
