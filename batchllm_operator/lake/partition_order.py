"""The order of partitions: by the numbers and dates that their names spell, not by their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_DIGITS: Final = re.compile(r"([0-9]+)")


def in_order(names: Iterable[str]) -> list[str]:
    """The names, ascending: numbers by value; in other names, digits by the number they spell.

    So 10 comes after 9, and `2026-W10` after `2026-W9`. Dates are in the order of time.
    """
    distinct = set(names)
    if all(map(_NUMBER.fullmatch, distinct)):
        return sorted(distinct, key=lambda name: (Decimal(name), name))
    return sorted(distinct, key=lambda name: (_spelled(name), name))


def before(names: Iterable[str], partition: str) -> list[str]:
    """Those of the names that come before `partition`, ascending."""
    ordered = in_order([*names, partition])
    return ordered[: ordered.index(partition)]


def _spelled(name: str) -> list[str | int]:
    """Texts and numbers by turns, so that a text is compared with a text."""
    return [int(part) if idx % 2 else part for idx, part in enumerate(_DIGITS.split(name))]
