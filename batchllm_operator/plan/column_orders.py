"""Reorders a template's columns, each with the text that belongs to it.

A template is split into a fixed head, a piece for each column, the separators between pieces, and
a fixed tail. A piece is a column with its label ("Query: ") and its closing tag ("</query>").
Pieces change places; head, separators and tail stay:

    Document: {body}\nQuery: {query}\nAnswer:   ->   Query: {query}\nDocument: {body}\nAnswer:

Text between two columns is split at its first line breaks: the text before them belongs to the
first column, the text after them to the second. Without a line break, its leading marks and spaces
are the separator. A closing tag always belongs to the column before it. The result reads well for
usual templates, and is always shown to the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, permutations
from string import Formatter
from typing import Final

_MAX_PERMUTED: Final = 4  # 24 orders
_CLOSING_TAG: Final = re.compile(r"(?:\s*</[^<>]*>)?")
_LINE_BREAKS: Final = re.compile(r"\s*\n\s*")
_MARKS: Final = re.compile(r"[\W_]*")


def column_orders(template: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Orders worth trying, the given one first: the template, and its columns.

    All orders of up to 4 columns, else each column first. A column counts as often as it is placed.
    """
    placed: list[tuple[str, str]] = []  # (text before, column)
    text = ""
    for literal, name, *_ in Formatter().parse(template):
        text += literal.replace("{", "{{").replace("}", "}}")
        if name is not None:
            placed.append((text, name))
            text = ""
    if not placed:
        yield template, ()
        return
    head, label = _split_head(placed[0][0])
    pieces, separators = [], []
    for (_, name), (between, _) in pairwise(placed):
        closing, separator, following = _split_between(between)
        pieces.append(f"{label}{{{name}}}{closing}")
        separators.append(separator)
        label = following
    closing = _closing(text)
    pieces.append(f"{label}{{{placed[-1][1]}}}{closing}")
    separators.append(text.removeprefix(closing))
    for order in _orders(len(pieces)):
        inner = (pieces[idx] + after for idx, after in zip(order, separators, strict=True))
        yield head + "".join(inner), tuple(placed[idx][1] for idx in order)


def _orders(num_pieces: int) -> Iterator[tuple[int, ...]]:
    given = range(num_pieces)
    if num_pieces <= _MAX_PERMUTED:
        return permutations(given)
    return ((first, *(idx for idx in given if idx != first)) for first in given)


def _split_head(text: str) -> tuple[str, str]:
    """(fixed, label): the label is the last line, without its leading marks.

    A line above the column is its label if it ends like one: "Document:" or "<document>".
    """
    is_above = text.endswith("\n") and text.rstrip().endswith((":", ">"))
    line_start = text.rfind("\n", 0, len(text.rstrip()) if is_above else None) + 1
    label = text[line_start:]
    cut = line_start + (0 if "<" in label else _num_marks(label))
    return text[:cut], text[cut:]


def _split_between(text: str) -> tuple[str, str, str]:
    """(closing of the column before, separator, label of the column after)."""
    closing = _closing(text)
    text = text.removeprefix(closing)
    if breaks := _LINE_BREAKS.search(text):
        return closing + text[: breaks.start()], breaks[0], text[breaks.end() :]
    is_plain = not closing and "<" not in text
    cut = _num_marks(text) if is_plain else len(text) - len(text.lstrip())
    return closing, text[:cut], text[cut:]


def _closing(text: str) -> str:
    """The closing tag of the column before, if the text begins with one."""
    tag = _CLOSING_TAG.match(text)
    return tag[0] if tag else ""


def _num_marks(text: str) -> int:
    marks = _MARKS.match(text)
    return marks.end() if marks else 0
