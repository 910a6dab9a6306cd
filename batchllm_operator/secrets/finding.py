"""Finds credentials in a job spec, which must hold none because every plan stores it."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final
from urllib.parse import urlsplit

# Secrets are found by names of settings and by the published forms of common credentials. Messages
# never repeat matched values.
_SECRET_NAME = re.compile(
    r"(^|[_\-])(token|(pg|ssh|my_?sql_?)?pass(wor[dt]s?|wds?|phrase)?|pwd|(secret|credential)s?"
    r"|(api|access|private|secret|fernet|encryption|signing|master|shared)[_\-]?keys?"
    r"|access[_\-]?key[_\-]?id|account[_\-]?key|connection[_\-]?string|sas|authorization|signature"
    r"|sig)$",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_VALUE = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_\-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}|\bglpat-[A-Za-z0-9_\-]{20,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9\-]{10,}|\bAIza[A-Za-z0-9_\-]{35}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bBearer [A-Za-z0-9._\-]{16,}"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,40}")
# Azure's URIs have a container in place of a user: abfss://container@account/folder.
_AZURE_SCHEME = re.compile(r"(.*\+)?(abfss?|wasbs?|az|adl)", re.IGNORECASE)
# Tokenizers call their markers tokens; these hold text such as "<s>".
_MARKER_NAME = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|stop)_token$", re.IGNORECASE)
_FREE_FORM: Final = ("engine.extra_args", "planner.spark.conf")
"""Fields with names from outside; elsewhere they are the spec's own, or refused."""
# Names of settings that say where a secret is.
_REFERENCE = re.compile(
    r"^spark\.kubernetes\.(driver|executor)\.(secrets|secretKeyRef)\."
    r"|\.(file|path|provider|name|itemKey)$"
)
_NOTHING: Final = frozenset({"", "none", "null", "true", "false", "***"})
_OPTION = re.compile(r"(?:^|\s)(?:-D|--?)?(?P<name>[A-Za-z][\w.\-]*)=(?P<value>\S+)")


def find_secrets(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted names of fields in `value` that seem to hold a secret."""
    if isinstance(value, Mapping):
        is_free = path.startswith(_FREE_FORM)
        for name, child in value.items():
            if is_secret_value(str(name)):
                yield f"a field's name in {path}" if path else "a field's name"
                continue
            here = f"{path}.{name}" if path else str(name)
            if is_free and _sets_secret(str(name), child):
                yield here
            else:
                yield from find_secrets(child, here)
    elif isinstance(value, list | tuple):
        for idx, child in enumerate(value):
            yield from find_secrets(child, f"{path}[{idx}]")
    elif isinstance(value, str):
        options = _OPTION.finditer(value) if path.startswith(_FREE_FORM) else ()
        if is_secret_value(value) or any(_sets_secret(*option.groups()) for option in options):
            yield path


def is_secret_value(text: str) -> bool:
    """Whether it looks like a secret, or holds one, whatever its field."""
    return bool(_SECRET_VALUE.search(text)) or holds_credentials(text)


def names_secret(name: str) -> bool:
    """Whether a setting of that name (in snake, kebab or camel case) holds a secret.

    One or two parts of a dotted name are enough, as in `adls.sas-token.ACCOUNT`, `s3a.access.key`.
    """
    if _MARKER_NAME.search(name):
        return False
    parts = _CAMEL_CASE.sub("_", name).split(".")
    parts += ["_".join(pair) for pair in pairwise(parts)]
    return any(_SECRET_NAME.search(part) is not None for part in parts)


def may_be_secret_text(name: str, text: str) -> bool:
    """Whether the value of a setting with a secret's name may be one: not if it stands for nothing,
    or is a number or marker of a model's tokens."""
    if text.lower() in _NOTHING:
        return False
    return not (name.lower().endswith("token") and (text.isdecimal() or text.startswith("<")))


def is_container(scheme: str, user_info: str) -> bool:
    """Whether the part before the `@` of a URI is an Azure container, not a user."""
    return bool(_AZURE_SCHEME.fullmatch(scheme)) and ":" not in user_info


def holds_credentials(value: str) -> bool:
    """Whether `value` is a URI, perhaps lacking a slash, with credentials in authority or query.

    Spark Connect and JDBC have parameters after semicolons, too.
    """
    schemes, slashes, rest = value.partition(":/")
    scheme = schemes.rpartition(":")[2]  # as in jdbc:postgresql:
    if not slashes or not _SCHEME.fullmatch(scheme):
        return False
    try:
        parts = urlsplit(f"s3://{rest.lstrip('/')}")
    except ValueError:  # opening it will fail with a message
        return "@" in value
    pairs = [*re.split("[&;]", parts.query), *f"{parts.netloc}{parts.path}".split(";")[1:]]
    names = (pair.partition("=")[0] for pair in pairs)
    user_info, at, _ = parts.netloc.rpartition("@")
    return bool(at and not is_container(scheme, user_info)) or any(map(names_secret, names))


def _sets_secret(name: str, value: object) -> bool:
    """Whether a setting holds a secret itself; values of a map are checked one by one."""
    if isinstance(value, Mapping | bool | None) or _REFERENCE.search(name):
        return False
    return names_secret(name) and may_be_secret_text(name, str(value))
