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
PATTERN = re.compile(r"^([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)([eE][+-]?\d+|[a-zA-Z]{0,2})$")

Amounts = dict[str, Decimal]


def quantity(text: str | int | float) -> Decimal:
    """The amount that a text names.

    Raises:
        ValueError: It isn't a quantity.
    """
    found = PATTERN.match(str(text))
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = found.groups()
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(number + suffix)
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity: no such suffix")
    return Decimal(number) * _SUFFIXES[suffix]


def is_quantity(text: str | int | float) -> bool:
    try:
        quantity(text)
    except ValueError:
        return False
    return True


def text_of(amount: Decimal, binary: bool = False) -> str:
    """The amount as Kubernetes would write it: with the largest suffix that needs no fraction."""
    if amount != amount.to_integral_value():
        return f"{math.ceil(amount * 1000)}m"
    number, base, ends = int(amount), 1000, ["", "k", "M", "G", "T", "P", "E"]
    if binary and abs(number) >= 1024:
        base, ends = 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    at = 0
    while number and number % base == 0 and at < len(ends) - 1:
        number, at = number // base, at + 1
    return f"{number}{ends[at]}"


def canonical(text: str | int | float) -> str:
    """A quantity as an API server gives it back: `1024Mi` is `1Gi`, `0.5` is `500m`.

    Raises:
        ValueError: It isn't a quantity.
    """
    if re.search("[eE][+-]?[0-9]+$", str(text)):
        return str(text)
    return text_of(quantity(text), str(text).endswith("i"))


def told(name: str, amount: Decimal) -> str:
    """An amount of a quota, whose unit goes by the resource."""
    return text_of(amount, binary="memory" in name or "storage" in name)


def container_amounts(container: Mapping[str, Any], which: str) -> Amounts:
    """A container's `requests` or `limits`."""
    stated = container.get("resources", {}).get(which, {})
    return {name: quantity(value) for name, value in stated.items()}


def pod_amounts(spec: Mapping[str, Any], which: str = "requests") -> Amounts:
    """What a pod requests (or is limited to): its containers together, or one init container."""
    total = summed(container_amounts(each, which) for each in spec.get("containers", []))
    for each in spec.get("initContainers", []):
        for name, amount in container_amounts(each, which).items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


def summed(parts: Iterable[Mapping[str, Decimal]]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total
