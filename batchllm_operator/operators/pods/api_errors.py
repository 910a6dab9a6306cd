"""What the cluster's API says when it refuses, in the words that decisions are made with."""

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
    """Whether the same call may be answered later."""
    if not isinstance(error, ApiException | AsyncApiException):
        return isinstance(error, Exception)
    if error.status == CONFLICT:  # over a quota that many change at a time
        return reason_of(error) == "Conflict"
    return error.status in (0, UNAUTHORIZED, TOO_MANY) or (error.status or 0) >= 500


def status_of(error: Any) -> Mapping[str, Any]:
    """The `Status` that the API answered an error with; empty if it wasn't the API, or no JSON."""
    try:
        body = json.loads(error.body or "")
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) and body.get("kind") == "Status" else {}


def reason_of(error: ApiException | AsyncApiException) -> str:
    """The API's word for an error, such as `AlreadyExists`."""
    return str(status_of(error).get("reason", ""))


def message_of(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {status_of(error).get('message') or error.reason}"
    return f"{type(error).__name__}: {error}"


def is_over_quota(error: Any) -> bool:
    """Whether a ResourceQuota has no room; a refusal by policy differs in its text only."""
    return error.status == FORBIDDEN and "exceeded quota" in (error.body or "")
