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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from string import Formatter
from typing import Final

_MAX_PERMUTED: Final = 4  # 24 orders
_CLOSING_TAG: Final = re.compile(r"\s*</[^<>]*>")
_LINE_BREAKS: Final = re.compile(r"\s*\n\s*")
_MARKS: Final = re.compile(r"[\W_]*")


@dataclass(frozen=True, slots=True)
class TemplatePieces:
    """A split template; `template(range(len(pieces)))` restores it."""

    head: str
    pieces: tuple[str, ...]
    """Template text of each column with what belongs to it."""
    columns: tuple[str, ...]
    """The column of each piece."""
    separators: tuple[str, ...]
    """One fewer than pieces."""
    tail: str

    def template(self, order: Sequence[int]) -> str:
        """The template with its pieces in the given order."""
        text = [self.head]
        for idx, separator in zip(order, (*self.separators, ""), strict=False):
            text += [self.pieces[idx], separator]
        return "".join([*text, self.tail])


def take_apart(template: str) -> TemplatePieces:
    """Split a template into its pieces."""
    parsed = [(_escape(literal), name) for literal, name, _, _ in Formatter().parse(template)]
    placed: list[tuple[str, str]] = []  # (text before, column)
    text = ""
    for literal, name in parsed:
        text += literal  # escaped braces come as pieces without a column
        if name is not None:
            placed.append((text, name))
            text = ""
    if not placed:
        return TemplatePieces(text, (), (), (), "")
    head, label = _split_head(placed[0][0])
    labels, closings, separators = [label], [], []
    for before, _ in placed[1:]:
        closing, separator, label = _split_between(before)
        closings.append(closing)
        separators.append(separator)
        labels.append(label)
    closings.append(_closing(text))
    columns = [name for _, name in placed]
    return TemplatePieces(
        head=head,
        pieces=tuple(
            f"{label}{{{name}}}{closing}"
            for label, name, closing in zip(labels, columns, closings, strict=True)
        ),
        columns=tuple(columns),
        separators=tuple(separators),
        tail=text.removeprefix(closings[-1]),
    )


def column_orders(num_pieces: int) -> Iterator[tuple[int, ...]]:
    """Orders worth trying, the given one first: all of up to 4 pieces, else each piece first."""
    given = tuple(range(num_pieces))
    if num_pieces <= _MAX_PERMUTED:
        yield from permutations(given)
        return
    for first in given:
        yield (first, *(idx for idx in given if idx != first))


def _split_head(text: str) -> tuple[str, str]:
    """(fixed, label): the label is the last line, without its leading marks.

    A line above the column is its label if it ends like one: "Document:" or "<document>".
    """
    is_above = text.endswith("\n") and text.rstrip().endswith((":", ">"))
    line_start = text.rfind("\n", 0, len(text.rstrip()) if is_above else None) + 1
    label = text[line_start:]
    if _has_tag(label):
        return text[:line_start], label
    marks = _MARKS.match(label)
    cut = line_start + (marks.end() if marks else 0)
    return text[:cut], text[cut:]


def _split_between(text: str) -> tuple[str, str, str]:
    """(closing of the column before, separator, label of the column after)."""
    closing = _closing(text)
    text = text.removeprefix(closing)
    if breaks := _LINE_BREAKS.search(text):
        return closing + text[: breaks.start()], breaks[0], text[breaks.end() :]
    marks = _MARKS.match(text)
    cut = len(text) - len(text.lstrip())
    if marks and not closing and not _has_tag(text):
        cut = marks.end()
    return closing, text[:cut], text[cut:]


def _closing(text: str) -> str:
    """The closing tag of the column before, if the text begins with one."""
    tag = _CLOSING_TAG.match(text)
    return tag[0] if tag else ""


def _has_tag(text: str) -> bool:
    return "<" in text


def _escape(literal: str) -> str:
    return literal.replace("{", "{{").replace("}", "}}")
