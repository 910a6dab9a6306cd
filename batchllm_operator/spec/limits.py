"""How large and how deep a spec may be, so that reading one takes neither much memory nor much
time, and which characters its texts may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

MAX_FILE_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 64
_MAX_VALUES: Final = 500_000
"""Counted as often as they are referred to: a short file of YAML aliases can say billions."""
_MAX_NAME_LEN: Final = 200


class LimitError(ValueError):
    """A spec is beyond what can be meant; the message repeats no value of it."""


def check_values(value: object) -> None:
    """Check a spec before anything else looks at all of it.

    Raises:
        LimitError: it is too deep (as is what holds itself) or too large, or a text in it couldn't
            be stored, or couldn't name a file.
    """
    check_tree(value, _children)
    for path, text in _texts(value, ""):
        if "\0" in text:
            raise LimitError(f"{path}: holds a NUL character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LimitError(
                f"{path}: holds half a surrogate pair, which is no character"
            ) from None


def check_tree(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Visit everything below `root`, each as often as something refers to it.

    Raises:
        LimitError: it is too deep or too large.
    """
    levels, num_values = [iter((root,))], 0
    while levels:
        value = next(levels[-1], levels)
        if value is levels:
            levels.pop()
            continue
        num_values += 1
        if num_values > _MAX_VALUES:
            raise LimitError(f"holds more than {_MAX_VALUES:,} values")
        if len(levels) > _MAX_DEPTH:
            raise LimitError(f"is more than {_MAX_DEPTH} levels deep, or holds itself")
        levels.append(iter(children(value)))


def shown(name: object, max_len: int = _MAX_NAME_LEN) -> str:
    text = str(name)
    if len(text) > max_len:
        text = f"{text[:max_len]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return (each for item in value.items() for each in item)
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """All strings in `value`, names of fields included, each after where it is."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            here = f"{path}.{shown(name)}" if path else shown(name)
            yield from _texts(name, here)
            yield from _texts(child, here)
    else:
        for child in _children(value):
            yield from _texts(child, path)
