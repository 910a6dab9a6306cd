"""What the errors of stores say; importing it loads no client."""

import errno
from typing import Any, Final, Literal

Condition = Literal["IfNoneMatch", "IfMatch"]
_STATUSES: Final = {errno.EEXIST: 412, errno.EBUSY: 412, errno.EACCES: 403}
"""Of errors of `clouds.ObjectStore`."""


def storage_errors() -> tuple[type[Exception], ...]:
    """What fsspec and s3fs raise; to be called in an `except`, as botocore is slow to import."""
    try:
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError:  # without the extra `s3` nothing raises it
        return (OSError,)
    return (OSError, BotoCoreError)


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
