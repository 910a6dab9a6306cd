"""What the kernel is to reach on an H100 or an H200, and whether a run did."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.kernel_workloads import DECODE_256, Setting, settings

CHIPS = ("H100", "H200")
MAX_PLAN_HOST_US = 100.0
PLAN_REQUESTS = 512


def _shares_a_lot(setting: Setting) -> bool:
    return (
        not setting.adjacent
        and setting.family.name == "decode_256"
        and setting.own == 256
        and setting.prefix >= 1024
        and setting.group_size >= 16
    )


_DEGREE_4 = Setting(DECODE_256, 1024, 256, 4)
_ADJACENT = Setting(DECODE_256, 1024, 256, 16, adjacent=True)


def _shares_nothing(setting: Setting, *, decodes: bool) -> bool:
    return setting.degree == 1 and decodes == (not setting.family.num_prefill)


_SPEEDUP, _BANDWIDTH = "speedup_vs_fa3", "unique_bandwidth_share"
ROW_TARGETS: Sequence[tuple[str, str, float, Callable[[Setting], bool]]] = (
    ("of FA3's speed: decode, degree >= 16, prefix >= 1024, own 256", _SPEEDUP, 2.0, _shares_a_lot),
    (
        "of HBM bandwidth on unique bytes: decode, degree >= 16, prefix >= 1024, own 256",
        _BANDWIDTH,
        0.65,
        lambda setting: _shares_a_lot(setting) or setting == _ADJACENT,
    ),
    (
        "of FA3's speed: decode, degree 16, prefix 1024, own 256, members adjacent",
        _SPEEDUP,
        1.0,
        _ADJACENT.__eq__,
    ),
    ("of FA3's speed: decode, degree 4, prefix 1024, own 256", _SPEEDUP, 1.3, _DEGREE_4.__eq__),
    ("of FA3's speed: decode, no sharing", _SPEEDUP, 0.95, partial(_shares_nothing, decodes=True)),
    (
        "of FA3's speed: prefill and decode, no sharing",
        _SPEEDUP,
        0.95,
        partial(_shares_nothing, decodes=False),
    ),
)
"""(name, key of a row, its least value, settings that it is for)."""


def is_target(setting: Setting) -> bool:
    """Whether a target is about this setting in particular, not about many like it."""
    return _shares_a_lot(setting) or setting in (_DEGREE_4, _ADJACENT)


def judge(
    rows: Sequence[tuple[Setting, Mapping[str, Any]]],
    plan_host_us: float | None,
    chip: str | None,
) -> list[dict[str, Any]]:
    """All targets with what was reached.

    What was measured decides: `num_rows` beside `num_rows_wanted` says how much that is. `met` is
    None where nothing was measured, and on any chip that the targets aren't for.
    """
    results: list[dict[str, Any]] = []
    for name, key, least, applies in ROW_TARGETS:
        values = {
            setting.name: row[key]
            for setting, row in rows
            if applies(setting) and row.get(key) is not None
        }
        worst = min(values, key=lambda name: values[name], default=None)
        reached = None if worst is None else values[worst]
        results.append(
            {
                "name": name,
                "at_least": least,
                "reached": reached,
                "worst_row": worst,
                "num_rows": len(values),
                "num_rows_wanted": sum(map(applies, settings(adjacent=True))),
                "met": None if reached is None else bool(reached >= least),
            }
        )
    results.append(
        {
            "name": f"host microseconds to plan a step of {PLAN_REQUESTS} requests",
            "at_most": MAX_PLAN_HOST_US,
            "reached": plan_host_us,
            "met": None if plan_host_us is None else plan_host_us <= MAX_PLAN_HOST_US,
        }
    )
    return results if chip in CHIPS else [{**result, "met": None} for result in results]
