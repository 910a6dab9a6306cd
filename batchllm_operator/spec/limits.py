"""Limits of a spec: its size and depth, to bound memory and time, and its texts' characters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

MAX_FILE_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 64
_MAX_VALUES: Final = 500_000
"""Each reference counts: a short file of YAML aliases can expand to billions of values."""
_MAX_NAME_LEN: Final = 200


class LimitError(ValueError):
    """A spec exceeds a limit; the message repeats no value."""


def check_values(value: object) -> None:
    """Raise LimitError as `check_tree`, or if a text in a spec can't be stored, or name a file."""
    check_tree(value, _children)
    for path, text in _texts(value, ""):
        if "\0" in text:
            raise LimitError(f"{path}: holds a NUL character")
        try:
            text.encode()
        except UnicodeEncodeError:
            reason = "holds half a surrogate pair, which is no character"
            raise LimitError(f"{path}: {reason}") from None


def check_tree(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Raise LimitError if what is below `root` is too deep, or too large by counted references."""
    num_values = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > _MAX_VALUES:
            raise LimitError(f"holds more than {_MAX_VALUES:,} values")
        if depth > _MAX_DEPTH:
            raise LimitError(f"is more than {_MAX_DEPTH} levels deep, or holds itself")
        for child in children(value):
            visit(child, depth + 1)

    visit(root, 1)


def shown(name: object, max_len: int = _MAX_NAME_LEN) -> str:
    text = str(name)
    if len(text) > max_len:
        text = f"{text[:max_len]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and text of all strings in `value`, including names of fields."""
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
