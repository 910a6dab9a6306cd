"""Selects settings by their timings: pure functions on plain data.

Timings are milliseconds by name of a workload; labels identify settings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil, exp, log
from typing import Final

Timings = Mapping[str, float]

LEAST_GAIN: Final = 0.01
"""Least part of the time that a change must save."""
MOST_LOSS_ALONE: Final = 1.02
"""Largest factor by which settings may slow down requests that share nothing."""
LEAST_GAIN_SHARED: Final = 0.03
"""Least part of the time that sharing a prefix must save to open the gate."""


def relative_time(timings: Timings, baseline: Timings) -> float:
    """Geometric mean over the workloads of time / baseline time.

    Raises:
        ValueError: the workloads differ, or there are none.
    """
    if not timings or timings.keys() != baseline.keys():
        raise ValueError(f"timings of {sorted(timings)}, the baseline of {sorted(baseline)}")
    return exp(sum(log(timings[name] / baseline[name]) for name in timings) / len(timings))


def faster_half(times: Mapping[str, float], always: Collection[str]) -> list[str]:
    """The faster half by relative time, fastest first, rounded up, and `always`.

    `always` doesn't count toward the half.
    """
    others = sorted((label for label in times if label not in always), key=times.__getitem__)
    kept = set(others[: ceil(len(others) / 2)]) | (set(always) & times.keys())
    return sorted(kept, key=times.__getitem__)


def choose(measured: Mapping[str, Timings], current: str, alone: Collection[str]) -> str:
    """The label with the shortest time relative to the current settings, or the current one.

    Args:
        measured: timings by label, including the current settings.
        current: the label of the current settings.
        alone: names of workloads that share nothing; their time may grow by at most the factor
            `MOST_LOSS_ALONE`, by geometric mean.
    """
    baseline = measured[current]

    def part(timings: Timings) -> Timings:
        return {name: time for name, time in timings.items() if name in alone}

    best, least = current, 1 - LEAST_GAIN
    for label, timings in measured.items():
        time = relative_time(timings, baseline)
        slows_alone = bool(alone) and relative_time(part(timings), part(baseline)) > MOST_LOSS_ALONE
        if time <= least and not slows_alone:
            best, least = label, time
    return best


def gate_table(timings: Mapping[tuple[int, int], tuple[float, float]]) -> dict[int, int]:
    """Least prefix in tokens by degree, for `Gate.min_prefix_tokens`.

    A degree gets the least prefix from which on sharing saves `LEAST_GAIN_SHARED` of the time at
    every timed length, but at most that of a smaller degree. Degrees without a change are left out.

    Args:
        timings: by (degree, prefix tokens): milliseconds with the gate open and closed.
    """
    table: dict[int, int] = {}
    least: int | None = None
    for degree in sorted({degree for degree, _ in timings}):
        lengths = sorted(tokens for each, tokens in timings if each == degree)
        from_here = None
        for tokens in reversed(lengths):
            shared, apart = timings[degree, tokens]
            if shared > apart * (1 - LEAST_GAIN_SHARED):
                break
            from_here = tokens
        if from_here is not None and (least is None or from_here < least):
            table[degree] = least = from_here
    return table
