"""What other libraries say of a failure, without the secrets that they may repeat."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

_HIDDEN: Final = "<hidden>"
_IN_ENVIRONMENT: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SECRET_NAME: Final = re.compile(
    r"token|secret|passw|credential|key|sas|connection.string|authorization|signature|^sig$",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(?<=://)[^\s/]+(?=@)")
_FEW_CHARS: Final = 8
"""Fewer than these are hidden only as words: they may be parts of others."""


def masked(text: str, settings: Mapping[str, Any] | None = None) -> str:
    """`text` without the secrets of `settings` and of the environment, and without user names.

    Args:
        text: what a library or a server says.
        settings: what the library was set up with, by name; values may be settings again.
    """
    values = {os.environ.get(name, "") for name in _IN_ENVIRONMENT}
    values |= set(_secrets(settings or {}))
    for value in sorted(filter(None, values), key=len, reverse=True):
        shape = re.escape(value)
        if len(value) < _FEW_CHARS:
            shape = rf"(?<!\w){shape}(?!\w)"
        text = re.sub(shape, _HIDDEN, text)
    return _USER_INFO.sub(_HIDDEN, text)


def shown_cause(
    error: BaseException, settings: Mapping[str, Any] | None = None
) -> BaseException | None:
    """The error, to be shown as the cause of another; None if its traceback tells a secret."""
    shown = "".join(traceback.format_exception(error))
    return error if masked(shown, settings) == shown else None


def _secrets(settings: Mapping[str, Any], is_secret: bool = False) -> Iterator[str]:
    """Values to hide, in the shapes in which they may be repeated."""
    for name, value in settings.items():
        hidden = is_secret or bool(_SECRET_NAME.search(name))
        if isinstance(value, Mapping):
            yield from _secrets(value, hidden)
        elif isinstance(value, str) and value.lower() not in ("true", "false"):
            for secret in [value] if hidden else _parts(value):
                # A file's last line break is escaped where the value is; an id comes before `:`.
                for shape in (secret, *secret.split(), secret.partition(":")[2]):
                    yield from (shape, unquote(shape))


def _parts(uri: str) -> Iterator[str]:
    """Passwords, and values of parameters, of what may be a URI."""
    _, scheme_end, rest = uri.partition("://")
    if scheme_end:
        address, _, query = rest.partition("?")
        user, at, _ = address.rpartition("@")
        if at:
            yield user
        for pair in filter(None, re.split("[&;]", query)):
            name, _, value = pair.partition("=")
            if _SECRET_NAME.search(name):
                yield value
