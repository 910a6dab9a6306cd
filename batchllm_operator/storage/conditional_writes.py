"""Whether an S3 store honours conditional writes, on which claims and commits depend.

Some stores accept `If-None-Match` and `If-Match` and ignore them: two workers would then hold one
claim, and two commits overwrite each other.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from batchllm_operator.errors import StorageError

if TYPE_CHECKING:
    from batchllm_operator.storage.folder import Folder

Condition = Literal["IfNoneMatch", "IfMatch"]
CONDITION_FAILS: Final = frozenset({409, 412})  # HTTP status
_UNMET: Final[dict[Condition, tuple[str, str]]] = {
    "IfNoneMatch": ("If-None-Match", "*"),
    "IfMatch": ("If-Match", '"00000000000000000000000000000000"'),
}
"""The header, and a value that doesn't hold for the file that is there."""
_log = logging.getLogger(__name__)
_proven: set[tuple[str | None, str, Condition]] = set()
"""Endpoint, bucket and condition."""


def check_conditional_writes(folder: Folder, *conditions: Condition) -> None:
    """Try conditional writes to a small file in the folder, which is removed; only on S3.

    A bucket is tried once in a process. If the folder can't be written, nothing is known: plans
    may be made with fewer rights than commits.

    Raises:
        StorageError: the store ignores or lacks a condition.
    """
    from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

    fs = folder.fs
    if not hasattr(fs, "call_s3"):
        return
    path = folder.full_path(f"_probe-{uuid.uuid4().hex}")
    bucket, key, _ = fs.split_path(path)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    unknown = [each for each in conditions if (endpoint, bucket, each) not in _proven]
    if not unknown:
        return
    target: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": b""}
    try:
        fs.call_s3("put_object", **target)
        try:
            for each in unknown:
                _check(fs, target, each, f"{folder.uri}: the S3 store of bucket {bucket!r}")
                _proven.add((endpoint, bucket, each))
        finally:
            with suppress(OSError, BotoCoreError):  # not all may delete; readers skip the file
                fs.rm_file(path)
    except (OSError, BotoCoreError) as error:
        _log.debug("%s: conditional writes can't be tried: %s", folder.uri, error)


def http_status(error: BaseException) -> int | None:
    """The status of S3's answer that an error of s3fs stands for; None if none came."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _check(fs: Any, target: dict[str, Any], condition: Condition, where: str) -> None:
    header, value = _UNMET[condition]
    try:
        fs.call_s3("put_object", **target, **{condition: value})
        how = "ignores"
    except OSError as error:
        status = http_status(error)
        if status in CONDITION_FAILS:
            return
        if status not in (400, 501):
            raise
        how = "doesn't know"
    raise StorageError(
        f"{where} {how} conditional writes ({header}), so concurrent workers and commits would"
        " overwrite each other; use a store that honours them, as AWS S3, MinIO and R2 do, or a"
        " newer version of this one"
    )
