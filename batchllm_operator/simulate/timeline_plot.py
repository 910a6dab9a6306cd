"""Plots the token-batch timeline: what each step computes (paper, Fig. 2 and 6)."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.simulate.machine import Machine
from batchllm_operator.simulate.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, for colour-blind readers.
_KINDS: Final = (
    ("num_decode_tokens", "decode", "#0072B2"),
    ("num_distinct_tokens", "prefill, distinct", "#E69F00"),
    ("num_prefix_tokens", "prefill, prefix", "#009E73"),
)
_LIMIT_COLOUR: Final = "#D55E00"
_BLOCKS_COLOUR: Final = "#555555"
_MOST_POINTS: Final = 2000
"""More than a panel's pixels; in longer runs, neighbouring steps are averaged."""
_INCHES: Final = (11.0, 2.6)
"""Width, and height of a panel."""


def plot_timelines(runs: Sequence[Run], machine: Machine) -> bytes:
    """A PNG with a panel per run: tokens of each step by kind, and below it KV blocks in use.

    Args:
        runs: at least one, of one workload.
        machine: the machine of all runs.
    """
    with _quiet_matplotlib():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(runs) + 0.8), layout="constrained")
        FigureCanvasAgg(figure)  # without pyplot, which keeps figures and needs a display
        axes = figure.subplots(
            2 * len(runs), 1, sharex=True, squeeze=False, height_ratios=[3, 1.2] * len(runs)
        )[:, 0]
        for idx, run in enumerate(runs):
            _draw_tokens(axes[2 * idx], run, machine)
            _draw_blocks(axes[2 * idx + 1], run, machine)
        axes[-1].set_xlabel(f"predicted time on {machine.gpu.name} (s)")
        axes[-1].set_xlim(0, max(run.predicted_s for run in runs))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_tokens(axes: Axes, run: Run, machine: Machine) -> None:
    line = run.timeline
    edges, starts = _bins(line.start_s, run.predicted_s)
    bottom = np.zeros(len(edges) - 1)
    for name, label, colour in _KINDS:
        top = bottom + _means(getattr(line, name), starts)
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=label)
        bottom = top
    axes.axhline(
        machine.max_num_batched_tokens,
        color=_LIMIT_COLOUR,
        linestyle="--",
        linewidth=1,
        label="chunk size",
    )
    num_averaged = -(-run.steps // len(starts))
    averaged = f", means of {num_averaged} steps" if num_averaged > 1 else ""
    axes.set_title(
        f"{run.policy}: {run.steps:,} steps{averaged}, {run.predicted_s:,.1f} s",
        loc="left",
        fontsize="medium",
    )
    axes.set_ylabel("tokens per step")
    axes.set_ylim(0, 1.05 * max(machine.max_num_batched_tokens, float(bottom.max())))


def _draw_blocks(axes: Axes, run: Run, machine: Machine) -> None:
    edges, starts = _bins(run.timeline.start_s, run.predicted_s)
    used = _means(run.timeline.num_used_blocks, starts) / machine.num_blocks
    axes.stairs(100 * used, edges, fill=True, color=_BLOCKS_COLOUR)
    axes.set_ylabel("KV blocks (%)", fontsize="x-small")
    axes.set_ylim(0, 100)


def _bins(start_s: NDArray[np.float64], end_s: float) -> tuple[NDArray[np.float64], Any]:
    """Edges in time, and the first step of each bin."""
    per_bin = -(-len(start_s) // _MOST_POINTS)
    starts = np.arange(0, len(start_s), per_bin)
    return np.append(start_s[starts], end_s), starts


def _means(values: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
    counts = np.diff(np.append(starts, len(values)))
    return np.asarray(np.add.reduceat(values, starts) / counts, dtype=np.float64)


@contextmanager
def _quiet_matplotlib() -> Iterator[None]:
    """Silence its warning that it uses a temporary folder because the home isn't writable."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
