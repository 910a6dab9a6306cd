"""Interprets error answers of the cluster's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kubernetes.client.exceptions import ApiException
from kubernetes_asyncio.client.exceptions import ApiException as AsyncApiException

CONFLICT: Final = 409
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
TOO_MANY: Final = 429
UNAUTHORIZED: Final = 401


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if not isinstance(error, ApiException | AsyncApiException):
        return isinstance(error, Exception)
    if error.status == CONFLICT:  # concurrent changes of a quota
        return reason_of(error) == "Conflict"
    return error.status in (0, UNAUTHORIZED, TOO_MANY) or (error.status or 0) >= 500


def status_of(error: Any) -> Mapping[str, Any]:
    """The `Status` in an error answer; empty if it isn't the API's, or isn't JSON."""
    try:
        body = json.loads(error.body or "")
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) and body.get("kind") == "Status" else {}


def reason_of(error: ApiException | AsyncApiException) -> str:
    """The API's reason for an error, such as `AlreadyExists`."""
    return str(status_of(error).get("reason", ""))


def message_of(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {status_of(error).get('message') or error.reason}"
    return f"{type(error).__name__}: {error}"


def is_over_quota(error: Any) -> bool:
    """Whether a ResourceQuota is exhausted; a refusal by policy differs in its text only."""
    return error.status == FORBIDDEN and "exceeded quota" in (error.body or "")
