"""Timelines of an engine's steps: condensed, and of simulated runs drawn by matplotlib (ADR 12)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.stored_plan.run_report import Timeline
from batchllm_operator.vllm_plugin.scheduler.trace import in_valley

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from batchllm_operator.simulate.machine import Machine
    from batchllm_operator.simulate.run import Run

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
# Okabe and Ito's colours, for colour-blind readers.
_COLOURS: Final = {
    "decode": "#0072B2",
    "distinct": "#E69F00",
    "prefix": "#009E73",
    "limit": "#D55E00",
    "saved": "#555555",
    "muted": "#555555",
}
_PNG_INCHES: Final = (11.0, 2.6)
"""Width, and height of a run's panel."""
_PNG_BINS: Final = 1000


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


def draw_runs(runs: Sequence[Run], machine: Machine) -> bytes:
    """A PNG with a panel for each simulated run, of one workload on one machine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _PNG_INCHES[1] * len(runs) + 0.8
    figure = Figure(figsize=(_PNG_INCHES[0], height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which keeps figures and needs a display
    ratios = [3, 1.2] * len(runs)
    axes = figure.subplots(2 * len(runs), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for run, (upper, lower) in zip(runs, axes.reshape(-1, 2), strict=True):
        _paint(upper, lower, _simulated(run, machine))
        title = f"{run.policy}: {run.steps:,} steps, {run.predicted_s:,.1f} s"
        upper.set_title(title, loc="left", fontsize="medium")
    lower.set_xlabel(f"predicted time on {machine.gpu.name} (s)")
    lower.set_xlim(0, max(run.predicted_s for run in runs))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _simulated(run: Run, machine: Machine) -> Timeline:
    line = run.timeline
    names = ("num_decode_tokens", "num_distinct_tokens", "num_prefix_tokens", "num_waiting")
    steps = {name: getattr(line, name) for name in (*names, "num_preempted", "num_used_blocks")}
    steps["start_s"] = line.start_s - line.start_s[0]
    steps["num_held_blocks"] = np.zeros(run.steps)
    steps["num_blocks"] = np.full(run.steps, machine.num_blocks)
    end_s = run.predicted_s - float(line.start_s[0])
    chunk = machine.max_num_batched_tokens
    return condense(steps, end_s, chunk, shard_idx=0, num_bins=_PNG_BINS)


def _paint(upper: Axes, lower: Axes, line: Timeline) -> None:
    """Tokens of each step by kind, and below them the KV blocks in use."""
    edges = np.arange(len(line.kv_used) + 1) * line.bin_s
    bottom = np.zeros(len(edges) - 1)
    for attribute, label, colour in TOKEN_STACK:
        top = bottom + np.array(getattr(line, attribute))
        upper.stairs(top, edges, baseline=bottom, fill=True, color=_COLOURS[colour], label=label)
        bottom = top
    highest = max(line.chunk_size, float(bottom.max()), 1)
    valleys = np.array(line.valley) >= VALLEY_BIN
    if valleys.any():
        shade: dict[str, Any] = {"color": _COLOURS["muted"], "alpha": 0.18, "zorder": 0}
        full = np.where(valleys, 2.0 * highest, 0.0)
        upper.stairs(full, edges, fill=True, label="valley", **shade)
    dashes: dict[str, Any] = {"color": _COLOURS["limit"], "linestyle": "--", "linewidth": 1}
    upper.axhline(line.chunk_size, label="chunk size", **dashes)
    upper.set_ylabel("tokens per step")
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylim(0, 1.08 * highest)
    for name, values in (("saved", line.kv_used), ("limit", line.kv_held)):
        if any(values):
            label = "KV in use" if name == "saved" else "KV held"
            percent = 100 * np.array(values)
            lower.stairs(percent, edges, fill=True, color=_COLOURS[name], label=label)
    lower.set_ylim(0, 105)
    lower.set_ylabel("% of KV blocks")
    lower.set_xlim(0, edges[-1])
