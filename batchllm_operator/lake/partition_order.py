"""Names of partitions: their values, and their order by the numbers and dates that they spell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Final
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyarrow import types

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")
CAN_NOT_NAME: Final = (
    "which can't name a partition; give the table a partition column of text, integers or dates,"
    " such as the date and hour of this one"
)
NAME_ONE: Final = (
    "name one with --ds or, in Airflow, with the task group's argument ds, such as"
    " ds=\"{{ logical_date.strftime('%Y-%m-%d') }}\" or its timetable's key_format"
)
"""Advice where a partition's name has another form than the table's."""
_DIGITS: Final = re.compile(r"([0-9]+)")
_FORMS: Final = {4: "%Y", 7: "%Y-%m", 10: "%Y-%m-%d", 13: "%Y-%m-%d-%H"}
"""Of names of times, by their lengths."""
_LEAST_ALIKE: Final = 6
"""Digits that two names of one time have in common: those of a year and a month."""


def value_named(name: str, kind: pa.DataType) -> str | int | date | None:
    """The value whose text is `name`, or None; `TypeError` if the type can't name partitions."""
    if types.is_string(kind):
        return name
    if not (types.is_integer(kind) or types.is_date32(kind)):
        raise TypeError
    try:
        value = int(name) if types.is_integer(kind) else date.fromisoformat(name)
        pa.scalar(value, kind)
    except (ValueError, OverflowError, pa.ArrowException):
        return None
    return value if str(value) == name else None


def times_named(name: str, zone: str | None) -> tuple[datetime, datetime]:
    """When the year, month, day or hour `2026-01-31-05` of a time zone begins and ends, in UTC.

    It ends when the next one begins: a day in which clocks change has 23 or 25 hours. Raises
    `ValueError`, `OverflowError`: the name isn't one.
    """
    first = datetime.strptime(name, _FORMS.get(len(name), ""))
    if len(name) > len("2026-01-31"):
        last = first + timedelta(hours=1)
    elif len(name) > len("2026-01"):
        last = first + timedelta(days=1)
    elif len(name) > len("2026"):
        last = (first + timedelta(days=31)).replace(day=1)
    else:
        last = first.replace(year=first.year + 1)
    clock = UTC if zone is None else ZoneInfo(zone)
    begin, end = (each.replace(tzinfo=clock).astimezone(UTC) for each in (first, last))
    return begin, end


def in_order(names: Iterable[str]) -> list[str]:
    """The names, ascending: numbers by value; in other names, digits by the number they spell.

    So 10 comes after 9, and `2026-W10` after `2026-W9`. Dates are in the order of time.
    """
    distinct = set(names)
    if all(map(_NUMBER.fullmatch, distinct)):
        return sorted(distinct, key=lambda name: (Decimal(name), name))
    return sorted(distinct, key=lambda name: (_spelled(name), name))


def before(names: Iterable[str], partition: str) -> list[str]:
    """The names that come before `partition`, ascending."""
    ordered = in_order([*names, partition])
    return ordered[: ordered.index(partition)]


def near(names: Iterable[str], partition: str, most: int = 3) -> list[str]:
    """The names that mean the same time, more or less exactly; else the partition's neighbours.

    `2026-01-31` is near `2026-01-31 00:00:00`, `20260131` and `2026-01`.
    """
    ordered = in_order(names)
    wanted = "".join(_DIGITS.findall(partition))
    alike = []
    for name in ordered if wanted else ():
        digits = "".join(_DIGITS.findall(name))
        if min(len(digits), len(wanted)) >= _LEAST_ALIKE and (
            digits.startswith(wanted) or wanted.startswith(digits)
        ):
            alike.append(name)
    if alike:
        return alike[:most]
    place = len(before(ordered, partition))
    return ordered[max(0, place - 1) : place + 1]


def shown_near(names: Iterable[str], partition: str) -> str:
    """The end of an error's message: the nearest names that are there."""
    nearest = ", ".join(map(repr, near(names, partition)))
    return f"; the nearest partitions are {nearest}" if nearest else ""


def _spelled(name: str) -> list[str | int]:
    """Texts and numbers by turns, so that a text is compared with a text."""
    return [int(part) if idx % 2 else part for idx, part in enumerate(_DIGITS.split(name))]
