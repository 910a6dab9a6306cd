"""Interprets errors of the cluster's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import ClientError
from kubernetes_asyncio.client.exceptions import ApiException

CONFLICT: Final = 409
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
_PASSING: Final = (0, 401, 429)
REFUSED: Final = (400, 403, 404, 422)
"""HTTP statuses of a request that would be refused again: the Job or its namespace is wrong."""


class NoConnectionError(Exception):
    """The cluster's address and credentials can't be read right now."""


ANSWERLESS: Final = (ApiException, ClientError, OSError, NoConnectionError)
"""What a call of the API may raise; a `TimeoutError` is an `OSError`."""


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if not isinstance(error, ApiException):
        return True
    if is_conflict(error):  # concurrent changes of a quota
        return reason_of(error) == "Conflict"
    if is_over_quota(error):
        return True
    return error.status in _PASSING or (error.status or 0) >= 500


def is_conflict(error: BaseException) -> bool:
    return isinstance(error, ApiException) and error.status == CONFLICT


def is_over_quota(error: ApiException) -> bool:
    """Whether a ResourceQuota is exhausted; a refusal by policy differs in its text only."""
    return error.status == FORBIDDEN and "exceeded quota" in str(status_of(error).get("message"))


def status_of(error: ApiException) -> Mapping[str, Any]:
    """The `Status` in an error answer; empty if it isn't the API's, or isn't JSON."""
    try:
        body = json.loads(error.body or "")
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) and body.get("kind") == "Status" else {}


def reason_of(error: ApiException) -> str:
    """The API's reason for an error, such as `AlreadyExists`."""
    return str(status_of(error).get("reason", ""))


def is_absent(error: BaseException) -> bool:
    """Whether the API says that there is no such object; a proxy's 404 doesn't."""
    if not isinstance(error, ApiException) or error.status != NOT_FOUND:
        return False
    return reason_of(error) == "NotFound"


def message_of(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {status_of(error).get('message') or error.reason}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
