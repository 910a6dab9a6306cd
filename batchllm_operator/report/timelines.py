"""Timelines of an engine's steps, condensed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.stored_plan.run_report import Timeline
from batchllm_operator.vllm_plugin.scheduler.trace import in_valley

NUM_BINS: Final = 240
TOKEN_STACK: Final = (
    ("num_decode_tokens", "decode", "decode"),
    ("num_distinct_tokens", "prefill, distinct", "distinct"),
    ("num_prefix_tokens", "prefill, prefix", "prefix"),
)
"""Field of a timeline, label and colour, from below."""
VALLEY_BIN: Final = 0.5
"""A bin is shaded from this share of its time in valleys on."""
_TOKEN_FIELDS: Final = tuple(name for name, _, _ in TOKEN_STACK)
STEP_COLUMNS: Final = (
    *("start_s", *_TOKEN_FIELDS, "num_waiting", "num_preempted"),
    *("num_used_blocks", "num_held_blocks", "num_blocks"),
)


def condense(
    steps: Mapping[str, NDArray[Any]],
    end_s: float,
    chunk_size: int,
    *,
    shard_idx: int,
    worker: int = 0,
    num_bins: int = NUM_BINS,
) -> Timeline:
    """The timeline of steps, in at most `num_bins` bins of equal length.

    Args:
        steps: `STEP_COLUMNS`, each [num_steps], at least one step; `start_s` ascends from 0.
        end_s: end of the last step.
        chunk_size: most tokens of a step.
        shard_idx, worker: name the timeline.
    """
    start_s, num_steps = steps["start_s"], len(steps["start_s"])
    edges = np.linspace(0.0, end_s, min(num_bins, num_steps) + 1)
    bounds_s = np.append(start_s, end_s)
    num_blocks = np.maximum(steps["num_blocks"], 1)
    used, held = (
        _largest(np.minimum(steps[name] / num_blocks, 1.0), start_s, edges)
        for name in ("num_used_blocks", "num_held_blocks")
    )
    num_tokens = sum((steps[name] for name in _TOKEN_FIELDS), start=np.zeros(num_steps))
    is_valley = in_valley(num_tokens, steps["num_waiting"], chunk_size)
    return Timeline(
        shard_idx=shard_idx,
        worker=worker,
        num_steps=num_steps,
        duration_s=round(end_s, 3),
        chunk_size=chunk_size,
        bin_s=float(edges[1]),
        kv_used=used,
        kv_held=held,
        valley=_means(is_valley, bounds_s, edges, digits=4),
        num_valley_steps=int(np.count_nonzero(is_valley)),
        valley_share=round(float(np.diff(bounds_s)[is_valley].sum()) / end_s, 4),
        num_preempted=int(steps["num_preempted"].sum()),
        **{name: _means(steps[name], bounds_s, edges) for name in _TOKEN_FIELDS},
    )


def _means(
    values: NDArray[Any], bounds_s: NDArray[np.float64], edges: NDArray[np.float64], digits: int = 1
) -> tuple[float, ...]:
    before = np.append(0.0, np.cumsum(values * np.diff(bounds_s)))
    means = np.diff(np.interp(edges, bounds_s, before)) / np.diff(edges)
    return tuple(np.round(means, digits).tolist())


def _largest(
    values: NDArray[np.float64], start_s: NDArray[np.float64], edges: NDArray[np.float64]
) -> tuple[float, ...]:
    num_bins = len(edges) - 1
    running = np.maximum(np.searchsorted(start_s, edges[:-1], "right") - 1, 0)
    largest = values[running]
    bins = np.clip(np.searchsorted(edges, start_s, "right") - 1, 0, num_bins - 1)
    np.maximum.at(largest, bins, values)
    return tuple(np.round(largest, 4).tolist())
