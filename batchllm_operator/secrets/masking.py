"""Masks credentials in text that is shown, because libraries' messages may repeat them.

A secret is masked in certain places: as user info or parameter of a URI, after the name of a
setting that holds secrets, in an `Authorization` header. It is masked anywhere only if it can't be
an ordinary word: the password `airflow` must not spoil `/opt/airflow/lake`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, filterfalse
from typing import Any, Final, TextIO
from urllib.parse import unquote

from batchllm_operator.secrets.finding import is_container, may_be_secret_text, names_secret

MASK: Final = "***"
_LONG_CHARS: Final = 16
"""A secret at least as long is masked anywhere, even if it consists of words."""
_FEW_CHARS: Final = 8
"""A shorter secret may be part of any text."""
_SEPARATORS: Final = re.compile(r"://|[\s/._~\-]|:(?=\d)")
_WORD: Final = re.compile(r"(?:[A-Z]*[a-z]*|[a-z]*(?:[A-Z][a-z]+)+)\d*")  # lake, GPUs, maxLen, v2
_FOLDERS: Final = ("PWD", "OLDPWD")  # set by shells

# A password may contain slashes, but a number after a colon may be a port, in a scheme that seldom
# has users; it may contain quotes, but these may also end a text.
_SCHEME_END: Final = re.compile(r"[A-Za-z0-9+.\-]{1,40}$")
_QUOTE_INSIDE: Final = r"['\"](?=[^\s'\",:;)\]}>\\])"
_USER_INFO: Final = re.compile(
    r"(?P<http>(?<=(?i:http))|(?<=(?i:https)))?+(?P<slashes>:/+)"
    rf"(?P<user>[^\s/?#'\"]{{1,4096}}(?:{_QUOTE_INSIDE}[^\s/?#'\"]{{0,4096}}){{0,8}}"
    r"|[^\s/?#@:'\"]{0,256}:(?(http)(?!\d{1,5}[/?#]))"
    rf"[^\s@'\"]{{1,256}}+(?:{_QUOTE_INSIDE}[^\s@'\"]{{0,256}}+){{0,8}}+)@"
)
_AUTHORIZATION: Final = re.compile(r"\b(?P<scheme>Bearer|Basic) +(?P<value>[^\s,;'\"\\]{1,8192})")
_QUOTED: Final = re.compile(
    r"[bru]?(?:\"(?:[^\"\\\n]|\\.){1,8192}\"|'(?:[^'\\\n]|\\.){1,8192}'"
    r"|\\\"(?:[^\"\\\n]|\\[^\"]){1,8192}\\\")"
)
_ASSIGNED: Final = re.compile(
    r"(?<![/\w%.\-])"  # not a partition's folder, such as lake/token=5
    r"(?P<name>[A-Za-z_][\w.\-]{0,99})\\?[\"']?[ \t]{0,4}(?P<sign>[=:])[ \t]{0,4}"
)
_BARE: Final = re.compile(r"(?:Bearer +|Basic +)?[^\s;&'\"]{0,8192}[^\s;&'\",)\]}]")
_MANY_CHARS: Final = 256
"""Characters of a value that decide: no word, number or type is as long."""
_LINE_END: Final = re.compile(r"[ \t]{0,99}\r?$", re.MULTILINE)
_NUMBER: Final = re.compile(r"\d[\d.,/]*(?:%|[A-Za-z]{1,2})")  # 97%, 2.5s
_TYPE: Final = re.compile(r"[a-z_]+\d*[<\[(]")  # timestamp[us], list<item: string>
_COLUMNS: Final = frozenset({"token", "signature", "sig", "sas", "pass", "pwd"})
"""Names of secrets that are also common names of columns, or verbs."""


@dataclass(frozen=True, slots=True)
class Masker:
    """Masks known secrets, and whatever looks like one, in texts."""

    anywhere: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that are masked everywhere, the longest first."""
    in_place: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that are masked only in the places of secrets."""

    @classmethod
    def of(cls, *settings: Mapping[str, Any], secrets: Iterable[str] = ()) -> Masker:
        """A masker for the secrets of environments and of libraries' settings, and for others.

        Settings are values by name, possibly nested. Secrets are those with names such as
        `AWS_SECRET_ACCESS_KEY`, and passwords and parameters of URIs.
        """
        known = chain(secrets, *map(_secrets, settings))
        shapes = {shape for secret in known for shape in _shapes(secret)}
        ordered = sorted(shapes, key=lambda secret: (-len(secret), secret))
        anywhere = tuple(filter(_is_unmistakable, ordered))
        return cls(anywhere, tuple(filterfalse(_is_unmistakable, ordered)))

    def __call__(self, text: str) -> str:
        if self.anywhere:
            text = _any_of(self.anywhere).sub(MASK, text)
        if self.in_place and "@" in text:
            text = _any_of(self.in_place, before="(?<=:)", after="(?=@)").sub(MASK, text)
        text = _USER_INFO.sub(_without_user_info, text)
        text = _AUTHORIZATION.sub(self._without_authorization, text)
        return "".join(self._without_values(text))

    def _without_authorization(self, match: re.Match[str]) -> str:
        value = match["value"]
        is_prose = _is_ordinary(value) and len(value) < _LONG_CHARS and value not in self.in_place
        return match[0] if is_prose else f"{match['scheme']} {MASK}"

    def _without_values(self, text: str) -> Iterator[str]:
        """Yield the pieces of `text`, with masks for the values of settings that hold secrets."""
        end = 0
        for match in _ASSIGNED.finditer(text):
            start = match.end()
            if match.start() < end or not names_secret(match["name"]):
                continue
            quoted = _QUOTED.match(text, start)
            value = quoted or _BARE.match(text, start, start + _MANY_CHARS)
            if value is None or not self._is_secret(match, value, is_quoted=quoted is not None):
                continue
            yield text[end:start]
            yield MASK
            end = (quoted or _BARE.match(text, start) or value).end()
        yield text[end:]

    def _is_secret(self, name: re.Match[str], value: re.Match[str], *, is_quoted: bool) -> bool:
        """Whether the value is a secret; a word after a colon may be anything."""
        setting, text = name["name"], value[0].strip("\\\"'")
        if not may_be_secret_text(setting, text):
            return False
        if text in self.in_place:
            return True
        is_part = name.string[max(0, name.start() - 1) : name.start()] == ";"  # of an address
        if setting in _FOLDERS and text.startswith("/") and not is_part:
            return False
        if name["sign"] == "=" or is_quoted or "authorization" in setting.lower():
            return True
        return not _is_prose(text) or (setting.lower() not in _COLUMNS and _is_line(name, value))


class MaskedStream:
    """A text stream that masks secrets before writing to the wrapped stream."""

    def __init__(self, stream: TextIO, masker: Masker) -> None:
        self.unmasked = stream
        self._masker = masker

    def write(self, text: str) -> int:
        self.unmasked.write(self._masker(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unmasked, name)


def print_unmasked(text: str) -> None:
    """Print text for programs or for pasting, which holds no messages of libraries."""
    print(text, file=getattr(sys.stdout, "unmasked", sys.stdout))


def _secrets(settings: Mapping[str, Any], is_secret: bool = False) -> Iterator[str]:
    """Values that must not be shown."""
    for name, value in settings.items():
        hidden = is_secret or (names_secret(str(name)) and name not in _FOLDERS)
        if isinstance(value, Mapping):
            yield from _secrets(value, hidden)
            continue
        if not isinstance(value, str):
            continue
        if value.lstrip().startswith("{"):  # an Airflow connection
            with suppress(ValueError, RecursionError):
                fields = json.loads(value)  # also has hosts, projects and schemas
                yield from _secrets(fields)
                if hidden:
                    yield from (text for text in _secrets(fields, True) if not _is_ordinary(text))
                continue
        if hidden:
            yield value
        yield from _uri_secrets(value)


def _uri_secrets(uri: str) -> Iterator[str]:
    """User info, password, and values of parameters with names of secrets."""
    address, _, query = uri.partition("://")[2].partition("?")
    user_info, at, _ = address.rpartition("@")
    if at:
        yield from (user_info, user_info.partition(":")[2])
    for pair in re.split("[&;]", query):
        name, _, value = pair.partition("=")
        if names_secret(name):
            yield value


def _shapes(secret: str) -> Iterator[str]:
    """Parts of a secret that may be repeated: lines, words, and an OAuth client's secret."""
    for part in (secret.strip(), *secret.split(), secret.partition(":")[2]):
        for shape in (part, unquote(part)):
            if shape.lower() not in ("", "true", "false"):
                yield shape


def _is_unmistakable(secret: str) -> bool:
    """Whether it can't be anything but a secret, by its length and form."""
    if len(secret) < _FEW_CHARS:
        return False
    if not _is_ordinary(secret):
        return True
    is_place = "://" in secret or secret.startswith(("/", "./", "../", "~"))
    return len(secret) >= _LONG_CHARS and not is_place


def _is_ordinary(text: str) -> bool:
    """Whether it consists of words and numbers, like names and paths."""
    return all(_WORD.fullmatch(part) for part in _SEPARATORS.split(text))


def _is_prose(text: str) -> bool:
    """Whether it may be a word, a number or a type after a colon."""
    if len(text) >= _MANY_CHARS // 2:
        return False
    text = text.rstrip("!?.:")
    return _is_ordinary(text) or bool(_NUMBER.fullmatch(text) or _TYPE.match(text))


def _is_line(name: re.Match[str], value: re.Match[str]) -> bool:
    """Whether a line holds only a name and its value, as in a file of settings."""
    text, start = name.string, name.start()
    before = text[max(0, start - 100) : start].rpartition("\n")[2]
    return not before.strip(" \t\r-'\"") and _LINE_END.match(text, value.end()) is not None


@lru_cache(maxsize=32)
def _any_of(secrets: tuple[str, ...], before: str = "", after: str = "") -> re.Pattern[str]:
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, secrets))}){after}")


def _without_user_info(match: re.Match[str]) -> str:
    start = match.start()
    scheme = _SCHEME_END.search(match.string[max(0, start - 40) : start])
    if scheme and is_container(scheme[0], match["user"]):
        return match[0]
    return f"{match['slashes']}{MASK}@"
