"""Amounts of resources, such as `500m` CPUs or `2Gi` of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
_PATTERN = re.compile(rf"([+-]?\d*\.?\d+)({'|'.join(_SUFFIXES)})")

Amounts = dict[str, Decimal]


def quantity(text: str | int | float) -> Decimal:
    """The amount that a text names.

    Raises:
        ValueError: It isn't a quantity.
    """
    found = _PATTERN.fullmatch(str(text))
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    return Decimal(found[1]) * _SUFFIXES[found[2]]


def told(name: str, amount: Decimal) -> str:
    """An amount of a quota, with the largest suffix of the resource that needs no fraction."""
    if amount != amount.to_integral_value():
        return f"{math.ceil(amount * 1000)}m"
    number, base, ends = int(amount), 1000, ["", "k", "M", "G", "T", "P", "E"]
    if ("memory" in name or "storage" in name) and abs(number) >= 1024:
        base, ends = 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    at = 0
    while number and number % base == 0 and at < len(ends) - 1:
        number, at = number // base, at + 1
    return f"{number}{ends[at]}"


def container_amounts(container: Mapping[str, Any]) -> Amounts:
    """What a container requests."""
    stated = container.get("resources", {}).get("requests", {})
    return {name: quantity(value) for name, value in stated.items()}


def pod_amounts(spec: Mapping[str, Any]) -> Amounts:
    """What a pod requests: its containers together, or one init container."""
    total = summed(container_amounts(each) for each in spec.get("containers", []))
    for each in spec.get("initContainers", []):
        for name, amount in container_amounts(each).items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


def summed(parts: Iterable[Mapping[str, Decimal]]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total
