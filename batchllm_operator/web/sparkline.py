"""A trend as a small picture in the page, with a text for screen readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 160
HEIGHT: Final = 36
_MARGIN: Final = 3


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A picture of `WIDTH` by `HEIGHT`, with a line for each stretch of known values."""

    lines: tuple[str, ...]
    """Points of SVG polylines."""
    last: tuple[float, float]
    text: str
    """The picture in words."""


def sparkline(
    what: str, values: Sequence[float | None], shown: Callable[[float], str]
) -> Sparkline | None:
    """The trend of `values`, the earliest first; None unless at least two are known.

    The text names the values by `what`, and formats them by `shown`.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    low, high = min(known), max(known)
    step = (WIDTH - 2 * _MARGIN) / (len(values) - 1)

    def point(idx: int, value: float) -> tuple[float, float]:
        share = (value - low) / (high - low) if high > low else 0.5
        y = HEIGHT - _MARGIN - share * (HEIGHT - 2 * _MARGIN)
        return round(_MARGIN + idx * step, 1), round(y, 1)

    lines: list[list[tuple[float, float]]] = [[]]
    last = (0.0, 0.0)
    for idx, value in enumerate(values):
        if value is None:
            lines.append([])
        else:
            last = point(idx, value)
            lines[-1].append(last)
    text = (
        f"{what} of the last {len(values)} partitions: from {shown(known[0])} to"
        f" {shown(known[-1])}, between {shown(low)} and {shown(high)}"
    )
    if len(known) < len(values):
        text += f"; unknown for {len(values) - len(known)}"
    return Sparkline(tuple(_drawn(line) for line in lines if line), last, text)


def _drawn(line: Sequence[tuple[float, float]]) -> str:
    """The points of an SVG polyline; a single point becomes a short dash."""
    points = [*line, (line[0][0] + 1, line[0][1])] if len(line) == 1 else line
    return " ".join(f"{x},{y}" for x, y in points)
