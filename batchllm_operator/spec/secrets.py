"""Finds credentials in a job spec, which is stored with every plan and must hold none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

# What gives a secret away: names of settings that hold one, and the published
# shapes of common credentials. Matched values are never repeated in a message.
_SECRET_NAME = re.compile(
    r"(^|[_\-])(token|(secret|password|passwd|((api|access|private|secret)_?key)|credential)s?"
    r"|access_?key_id|account_?key|connection_?string|authorization|signature|sig)$",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_VALUE = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_\-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bglpat-[A-Za-z0-9_\-]{20,}|\bxox[abeoprs]-[A-Za-z0-9\-]{10,}"
    r"|\bAIza[A-Za-z0-9_\-]{35}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bBearer [A-Za-z0-9._\-]{16,}"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,40}")
# Tokenizers call their markers tokens; these hold text such as "<s>".
_MARKER_NAME = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|stop)_token$", re.IGNORECASE)


def find_secrets(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted names of fields in `value` that hold something like a secret."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            here = f"{path}.{name}" if path else str(name)
            if child is not None and names_secret(str(name)) and not isinstance(child, Mapping):
                yield here
            else:
                yield from find_secrets(child, here)
    elif isinstance(value, list | tuple):
        for idx, child in enumerate(value):
            yield from find_secrets(child, f"{path}[{idx}]")
    elif isinstance(value, str) and (_SECRET_VALUE.search(value) or holds_credentials(value)):
        yield path


def names_secret(name: str) -> bool:
    """Whether a setting of that name (in snake, kebab or camel case) holds a secret."""
    if _MARKER_NAME.search(name):
        return False
    return _SECRET_NAME.search(_CAMEL_CASE.sub("_", name)) is not None


def holds_credentials(value: str) -> bool:
    """Whether `value` is a URI with a password or key in its authority or query.

    One with a slash missing counts, too.
    """
    scheme, slashes, rest = value.partition(":/")
    if not slashes or not _SCHEME.fullmatch(scheme):
        return False
    try:
        parts = urlsplit(f"s3://{rest.lstrip('/')}")
    except ValueError:  # broken; whoever opens it will say so
        return "@" in value
    names = (pair.partition("=")[0] for pair in parts.query.split("&"))
    return "@" in parts.netloc or any(map(names_secret, names))
