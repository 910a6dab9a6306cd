"""Settings for S3: retries with jitter and a cap, and timeouts; the user's own settings win."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import fsspec

from batchllm_operator.errors import SpecError

_CONNECT_TIMEOUT_S: Final = 10
_READ_TIMEOUT_S: Final = 30
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_MAX_ATTEMPTS: Final = 5
"""Requests per call, including the first; pauses between them are random, at most 20 s."""


def s3_options(uri: str) -> dict[str, Any]:
    """File system options for an S3 URI; none for any other.

    Settings of the environment (`AWS_RETRY_MODE`, `AWS_MAX_ATTEMPTS`), the AWS profile and
    fsspec's configuration are left as they are.

    Raises:
        SpecError: the endpoint in the environment isn't valid.
    """
    scheme = uri.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        return {}
    _check_endpoint()
    chosen = _profile()
    retries: dict[str, Any] = {}
    if "AWS_RETRY_MODE" not in os.environ and "retry_mode" not in chosen:
        retries["mode"] = "standard"
    if "AWS_MAX_ATTEMPTS" not in os.environ and "max_attempts" not in chosen:
        retries["total_max_attempts"] = _MAX_ATTEMPTS
    config = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retries": retries,
    }
    # Options of a file system replace fsspec's configuration, so that is merged in here.
    return {"config_kwargs": config | fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})}


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


def _profile() -> Mapping[str, Any]:
    """Settings of the profile in use, from the AWS configuration files."""
    from botocore.exceptions import BotoCoreError  # slow to import
    from botocore.session import Session

    try:
        found: Mapping[str, Any] = Session().get_scoped_config()
    except BotoCoreError:  # such as an unknown profile, which the first call reports
        return {}
    return found
