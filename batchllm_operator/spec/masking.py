"""Takes credentials out of text that is shown, wherever a library's message may repeat them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO
from urllib.parse import unquote, urlsplit

from batchllm_operator.spec.secrets import names_secret

MASK: Final = "***"
MIN_SECRET_LEN: Final = 5  # as for Airflow: hiding a shorter one would spoil every line
_USER_INFO: Final = re.compile(r"(:/+)[^\s/?#@'\"]{1,4096}@")
_PARAMETER: Final = re.compile(r"([?&;])([^\s?&;=#'\"]{1,100})=([^\s&;#'\"]{1,8192})")


def mask(text: str, secrets: Iterable[str]) -> str:
    """`text` with asterisks in place of secrets; give those that contain others first."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def mask_uris(text: str) -> str:
    """`text` with asterisks in place of what URIs in it hold of credentials."""
    return _PARAMETER.sub(_masked_parameter, _USER_INFO.sub(rf"\1{MASK}@", text))


def hidden_parts(value: str) -> set[str]:
    """A secret and its lines, for logs come line by line."""
    return {part for part in (value, *value.splitlines()) if len(part) >= MIN_SECRET_LEN}


def environment_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables that aren't to be shown, those that contain others first.

    By the variable's name, as `AWS_SECRET_ACCESS_KEY` or `PYICEBERG_CATALOG__LAKE__CREDENTIAL`, or
    as part of a URI, as in `PYICEBERG_CATALOG__LAKE__URI`.
    """
    found: set[str] = set()
    for name, value in environment.items():
        if names_secret(name):
            found |= hidden_parts(value)
            found |= hidden_parts(value.partition(":")[2])  # of a client's id and secret
        elif "://" in value:
            found |= _password(value)
    return tuple(sorted(found, key=len, reverse=True))


class MaskedStream:
    """A text stream that writes no secrets to the one that it stands for."""

    def __init__(self, stream: TextIO, secrets: Iterable[str]) -> None:
        self._stream, self._secrets = stream, tuple(secrets)

    def write(self, text: str) -> int:
        self._stream.write(mask_uris(mask(text, self._secrets)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _masked_parameter(match: re.Match[str]) -> str:
    before, name, _ = match.groups()
    return f"{before}{name}={MASK}" if names_secret(name) else match[0]


def _password(uri: str) -> set[str]:
    try:
        password = urlsplit(uri).password or ""
    except ValueError:  # broken: what is shown of it is masked as a URI
        return set()
    return hidden_parts(password) | hidden_parts(unquote(password))
