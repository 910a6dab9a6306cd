"""What the kernel is to reach on an H100 or an H200, and whether a run did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_workloads import DECODE_256, Setting, settings

CHIPS = ("H100", "H200")
MAX_PLAN_HOST_US = 100.0
PLAN_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class RowTarget:
    """A least value in every row of a kind that was measured."""

    name: str
    key: str
    """Of a row."""
    least: float
    applies: Callable[[Setting], bool]

    def result(self, rows: Iterable[tuple[Setting, Mapping[str, Any]]]) -> dict[str, Any]:
        """The worst row of those that there are; `reached` is None if nothing was measured."""
        values = {
            setting.name: row[self.key]
            for setting, row in rows
            if self.applies(setting) and row.get(self.key) is not None
        }
        worst = min(values, key=lambda name: values[name], default=None)
        return {
            "name": self.name,
            "at_least": self.least,
            "reached": values[worst] if worst is not None else None,
            "worst_row": worst,
            "num_rows": len(values),
            "num_rows_wanted": sum(map(self.applies, settings(adjacent=True))),
        }


def _shares_a_lot(setting: Setting) -> bool:
    return (
        not setting.adjacent
        and setting.family.name == "decode_256"
        and setting.own == 256
        and setting.prefix >= 1024
        and setting.group_size >= 16
    )


def _shares_among(degree: int, *, adjacent: bool) -> Callable[[Setting], bool]:
    wanted = Setting(DECODE_256, 1024, 256, degree, adjacent=adjacent)
    return lambda setting: setting == wanted


_shares_among_four = _shares_among(4, adjacent=False)
_adjacent = _shares_among(16, adjacent=True)


def _shares_nothing(*, decode: bool) -> Callable[[Setting], bool]:
    return lambda setting: setting.degree == 1 and decode == (not setting.family.num_prefill)


SPEEDUP, BANDWIDTH = "speedup_vs_fa3", "unique_bandwidth_share"
ROW_TARGETS = (
    RowTarget(
        "of FA3's speed: decode, degree >= 16, prefix >= 1024, own 256", SPEEDUP, 2.0, _shares_a_lot
    ),
    RowTarget(
        "of HBM bandwidth on unique bytes: decode, degree >= 16, prefix >= 1024, own 256",
        BANDWIDTH,
        0.65,
        lambda setting: _shares_a_lot(setting) or _adjacent(setting),
    ),
    RowTarget(
        "of FA3's speed: decode, degree 16, prefix 1024, own 256, members adjacent",
        SPEEDUP,
        1.0,
        _adjacent,
    ),
    RowTarget(
        "of FA3's speed: decode, degree 4, prefix 1024, own 256", SPEEDUP, 1.3, _shares_among_four
    ),
    RowTarget("of FA3's speed: decode, no sharing", SPEEDUP, 0.95, _shares_nothing(decode=True)),
    RowTarget(
        "of FA3's speed: prefill and decode, no sharing",
        SPEEDUP,
        0.95,
        _shares_nothing(decode=False),
    ),
)


def is_target(setting: Setting) -> bool:
    """Whether a target is about this setting in particular, not about many like it."""
    return _shares_a_lot(setting) or _shares_among_four(setting) or _adjacent(setting)


def judge(
    rows: Sequence[tuple[Setting, Mapping[str, Any]]],
    plan_host_us: float | None,
    chip: str | None,
) -> list[dict[str, Any]]:
    """All targets with what was reached.

    What was measured decides: `num_rows` beside `num_rows_wanted` says how much that is. `met` is
    None where nothing was measured, and on any chip that the targets aren't for.
    """
    results = [target.result(rows) for target in ROW_TARGETS]
    results.append(
        {
            "name": f"host microseconds to plan a step of {PLAN_REQUESTS} requests",
            "at_most": MAX_PLAN_HOST_US,
            "reached": plan_host_us,
        }
    )
    for result in results:
        result["met"] = _met(result) if chip in CHIPS else None
    return results


def _met(result: Mapping[str, Any]) -> bool | None:
    reached = result["reached"]
    if reached is None:
        return None
    if "at_most" in result:
        return bool(reached <= result["at_most"])
    return bool(reached >= result["at_least"])
