"""S3 as a file system of fsspec: settings for its client, and conditional writes."""

from __future__ import annotations

import logging
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import fsspec
import s3fs  # first, so that where it is missing it is named
from botocore.exceptions import BotoCoreError

from batchllm_operator.errors import SpecError, StorageError
from batchllm_operator.storage.failures import Condition, http_status, is_unmet

_TIMEOUTS: Final = {"connect_timeout": 10, "read_timeout": 30}
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_PART_BYTES: Final = 64 << 20  # of a single request, or of a part of a larger upload
_MOST_PARTS: Final = 10_000
_UPLOADS: Final = 4  # concurrent; each has a part in memory
_UNMET: Final[dict[Condition, tuple[str, str]]] = {
    "IfNoneMatch": ("If-None-Match", "*"),
    "IfMatch": ("If-Match", '"00000000000000000000000000000000"'),
}
"""The header, and a value that doesn't hold for the file that is there."""
_log = logging.getLogger(__name__)
_proven: set[tuple[str | None, str, Condition]] = set()
"""Endpoint, bucket and condition."""


class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs ships no types
    """s3fs's file system, with conditional writes."""

    @classmethod
    def at(cls, uri: str, **options: Any) -> Self:
        """That of an S3 URI, with timeouts, and fsspec's own configuration.

        Retries are botocore's: 5 requests, unless the environment or the AWS profile says
        otherwise. Raises `SpecError`: the endpoint in the environment isn't valid.
        """
        _check_endpoint()
        given = fsspec.config.conf.get(uri.partition("://")[0], {}).get("config_kwargs", {})
        # No listings are cached: other processes write here, too.
        settings = {"use_listings_cache": False, "config_kwargs": _TIMEOUTS | given}
        return cls(**settings | options)

    def check_honours(self, folder: str, *conditions: Condition) -> None:
        """Try conditional writes to a small file in a folder, which is removed.

        Some stores accept `If-None-Match` and `If-Match` and ignore them: two workers would then
        hold one claim, and two commits overwrite each other. A bucket is tried once in a process.
        If the folder can't be written, nothing is known: plans may be made with fewer rights than
        commits.
        """
        path = f"{folder}/_probe-{uuid.uuid4().hex}"
        bucket, key, _ = self.split_path(path)
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
        unknown = [name for name in conditions if (endpoint, bucket, name) not in _proven]
        if not unknown:
            return
        target: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": b""}
        try:
            self.call_s3("put_object", **target)
            try:
                for condition in unknown:
                    if (how := self._breach(target, condition)) is not None:
                        raise StorageError(
                            f"s3://{folder}: the S3 store of bucket {bucket!r} {how} conditional"
                            f" writes ({_UNMET[condition][0]}), so concurrent workers and commits"
                            " would overwrite each other; use a store that honours them, as AWS S3,"
                            " MinIO and R2 do, or a newer version of this one"
                        )
                    _proven.add((endpoint, bucket, condition))
            finally:
                with suppress(OSError, BotoCoreError):  # not all may delete; readers skip the file
                    self.rm_file(path)
        except (OSError, BotoCoreError) as error:
            _log.debug("s3://%s: conditional writes can't be tried: %s", folder, error)

    def _breach(self, target: dict[str, Any], condition: Condition) -> str | None:
        """What the store does with a condition that doesn't hold, in place of a refusal."""
        try:
            self.call_s3("put_object", **target, **{condition: _UNMET[condition][1]})
            return "ignores"
        except OSError as error:
            if is_unmet(error):
                return None
            if http_status(error) not in (400, 501):
                raise
            return "doesn't know"

    def put_if(self, path: str, source: Path, etag: Any) -> None:
        """Copy a local file to `path` if that has the ETag; if there is no file, for None.

        Raises `OSError`, `BotoCoreError`: it failed; see `is_unmet`.
        """
        condition = {"IfMatch": etag} if etag is not None else {"IfNoneMatch": "*"}
        bucket, key, _ = self.split_path(path)
        target = {"Bucket": bucket, "Key": key}
        num_bytes = source.stat().st_size
        if num_bytes <= _PART_BYTES:
            self.call_s3("put_object", **target, Body=source.read_bytes(), **condition)
            return
        target["UploadId"] = self.call_s3("create_multipart_upload", **target)["UploadId"]
        part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))

        def upload(number: int) -> dict[str, Any]:
            with source.open("rb") as file:
                file.seek((number - 1) * part_bytes)
                body = file.read(part_bytes)
            answer = self.call_s3("upload_part", **target, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(_UPLOADS) as pool:
                parts = list(pool.map(upload, range(1, -(-num_bytes // part_bytes) + 1)))
        except BaseException:
            self.call_s3("abort_multipart_upload", **target)
            raise
        # Not aborted if this fails: it may have succeeded with its answer lost.
        done = {"MultipartUpload": {"Parts": parts}, **condition}
        self.call_s3("complete_multipart_upload", **target, **done)


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
