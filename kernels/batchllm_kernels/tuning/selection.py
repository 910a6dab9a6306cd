"""What is kept, from timings alone: pure functions on plain data.

Timings are milliseconds by name of a workload; settings are known by their labels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil, exp, log
from typing import Final

Timings = Mapping[str, float]

MOST_LOSS_ALONE: Final = 1.02
"""Settings may slow requests that share nothing by this factor at the most."""
LEAST_GAIN_SHARED: Final = 0.03
"""Part of the time that sharing a prefix must save before the gate opens for it."""


def relative_time(timings: Timings, baseline: Timings) -> float:
    """Geometric mean, over the workloads, of time as a multiple of the baseline's.

    Raises:
        ValueError: the workloads aren't the same, or there are none.
    """
    if not timings or timings.keys() != baseline.keys():
        raise ValueError(f"timings of {sorted(timings)}, the baseline of {sorted(baseline)}")
    return exp(sum(log(timings[name] / baseline[name]) for name in timings) / len(timings))


def faster_half(times: Mapping[str, float], always: Collection[str]) -> list[str]:
    """The faster half by relative time, fastest first, rounded up; `always` stays whatever it is.

    `always` doesn't count toward the half.
    """
    others = sorted((label for label in times if label not in always), key=times.__getitem__)
    kept = set(others[: ceil(len(others) / 2)]) | (set(always) & times.keys())
    return sorted(kept, key=times.__getitem__)


def choose(
    measured: Mapping[str, Timings], current: str, alone: Collection[str], least_gain: float = 0.01
) -> str:
    """The label with the least relative time to the current settings, or the current one.

    Args:
        measured: timings by label; the current settings' must be there.
        current: the label of what is used now.
        alone: names of workloads that share nothing: there nothing may be more than
            `MOST_LOSS_ALONE` times as slow as now, by geometric mean.
        least_gain: part of the time that a change must save.
    """
    baseline = measured[current]

    def part(timings: Timings) -> Timings:
        return {name: time for name, time in timings.items() if name in alone}

    best, least = current, 1 - least_gain
    for label, timings in measured.items():
        time = relative_time(timings, baseline)
        slows_alone = bool(alone) and relative_time(part(timings), part(baseline)) > MOST_LOSS_ALONE
        if time <= least and not slows_alone:
            best, least = label, time
    return best


def gate_table(timings: Mapping[tuple[int, int], tuple[float, float]]) -> dict[int, int]:
    """Least prefix in tokens by degree, as `Gate.min_prefix_tokens` has it.

    A degree gets the least prefix from which on sharing saves `LEAST_GAIN_SHARED` of the time at
    every length that was timed, and no more than a smaller degree gets. Degrees that say nothing
    new are left out.

    Args:
        timings: by (degree, prefix tokens): milliseconds with the gate open, and with it closed.
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
