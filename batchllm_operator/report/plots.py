"""The plots of a run report, but for its timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchllm_operator.amounts import clipped, counted
from batchllm_operator.prefixes.sharing import Histogram
from batchllm_operator.report.drawing import Plot, colour, draw, plain_axes, short_number
from batchllm_operator.report.pages import count, duration, ratio
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.run_report import RunReport, ShardRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MOST_BARS: Final = 40
_MAX_BAR_NAME: Final = 24
_FEWEST_SLOTS: Final = 8
"""Minimum of bars that an axis has room for, so that a single one isn't as wide as the page."""


def saving_plot(report: RunReport) -> Plot:
    """Optimal, planned and achieved saving ratio."""
    values = {
        "optimal": report.optimal_saving,
        "planned": report.planned_saving,
        "achieved": report.achieved_saving,
    }
    shown = {name: ratio(value) for name, value in values.items()}
    percents = [100 * (value or 0.0) for value in values.values()]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        colours = [colour("line"), colour("decode"), colour("prefix")]
        _bars_across(axes, list(values), percents, colours, list(shown.values()))
        axes.set_xlim(1.15 * min(0.0, *percents), 118 if narrow else 108)
        axes.set_xlabel("% of prompt tokens saved")

    return draw(
        "Prompt tokens saved",
        "Bars of the share of prompt tokens that needn't be computed: "
        + ", ".join(f"{text} {name}" for name, text in shown.items()),
        ("Saving", "Share of prompt tokens"),
        list(shown.items()),
        paint,
        heights=(1.5, 1.6),
    )


def token_plot(done: Counts) -> Plot:
    """Where the tokens of a run went; prompt tokens, but for the last kind."""
    kinds = {
        "prompt, of duplicate rows": done.num_duplicate_tokens,
        "prompt, found in the KV cache": done.num_cached_tokens,
        "prompt, computed": done.num_computed_tokens,
        "output": done.num_output_tokens,
    }
    colours = [colour(name) for name in ("saved", "prefix", "distinct", "decode")]
    shown = {name: count(number) for name, number in kinds.items()}

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        _bars_across(axes, list(kinds), list(kinds.values()), colours, list(shown.values()))
        _count_along(axes, list(kinds.values()), "tokens", narrow)

    return draw(
        "Tokens by kind",
        "Bars of tokens: " + ", ".join(f"{number} {name}" for name, number in shown.items()),
        ("Kind", "Tokens", "Share"),
        _shares(kinds),
        paint,
        heights=(1.9, 2.1),
    )


def value_plot(column: str, counts: Mapping[str, int]) -> Plot:
    """Rows by value of a column, such as its labels; `counts` has the most frequent first."""
    names = [_bar_name(value) for value in list(counts)[:_MOST_BARS]]
    numbers = list(counts.values())[:_MOST_BARS]
    rows = _shares(counts)
    shares = [share for _, _, share in rows[:_MOST_BARS]]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        _bars_across(axes, names, numbers, [colour("prefix")], shares)
        _count_along(axes, numbers, "rows", narrow)

    height = 0.24 * len(names) + 0.9
    return draw(
        f"Rows by {column}",
        f"Bars of rows by {column}: {counted(len(counts), 'value')}, most of the rows,"
        f" {shares[0]}, with {names[0]}",
        (column.capitalize(), "Rows", "Share"),
        rows,
        paint,
        heights=(height, height),
    )


def shard_plot(shards: Sequence[ShardRun]) -> Plot:
    slowest = sorted(shards, key=lambda shard: -shard.done.engine_s)[:_MOST_BARS]
    names = [str(shard.shard_idx) for shard in slowest]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        _bars_up(axes, names, [shard.done.engine_s for shard in slowest], colour("distinct"))
        if len(names) > (8 if narrow else 30):
            axes.set_xticks(axes.get_xticks()[:: 5 if narrow else 2])
        axes.set_ylabel("seconds")
        axes.set_xlabel("shard")

    seconds = np.array([shard.done.engine_s for shard in shards])
    return draw(
        "Seconds of generating, by shard",
        f"Bars of the {len(slowest)} slowest of {counted(len(shards), 'shard')}: the slowest took"
        f" {duration(float(seconds.max()))}, an average one {duration(float(seconds.mean()))}",
        ("Shard", "Generating", "Rows", "Computed tokens/s", "Output tokens/s"),
        [
            (
                str(shard.shard_idx),
                duration(shard.done.engine_s),
                count(shard.done.num_rows),
                count(shard.done.computed_tokens_per_s),
                count(shard.done.output_tokens_per_s),
            )
            for shard in slowest
        ],
        paint,
        heights=(2.0, 2.2),
    )


def histogram_plot(
    histogram: Histogram, title: str, sizes: str, things: str, fill: str
) -> Plot | None:
    """`things` by size, in bars of the page's colour `fill`; None if there are none."""
    edges, counts = histogram.edges, histogram.counts
    if not counts:
        return None
    names = [_bin_name(low, high) for low, high in pairwise(edges)]
    most = int(np.argmax(counts))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        if narrow:
            _bars_across(axes, names, counts, [colour(fill)])
            axes.set_ylabel(sizes)
            axes.set_xlabel(things)
            _count_ticks(axes.xaxis, 4)
            return
        _bars_up(axes, names, counts, colour(fill))
        axes.set_xlabel(sizes)
        axes.set_ylabel(things)
        axes.yaxis.set_major_formatter(short_number)

    return draw(
        title,
        f"Bars of {things} by {sizes}: {count(sum(counts))} {things} in all, most of them,"
        f" {count(counts[most])}, with {names[most]}",
        (sizes.capitalize(), things.capitalize()),
        [(name, count(number)) for name, number in zip(names, counts, strict=True)],
        paint,
        heights=(2.2, max(2.3, 0.24 * len(names) + 0.8)),
    )


def _shares(counts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Name, count and share of all of each part."""
    total = max(1, sum(counts.values()))
    return [(name, count(number), ratio(number / total)) for name, number in counts.items()]


def _bars_across(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    labels: Sequence[str] = (),
) -> None:
    """Bars from left to right, the first one on top, with labels at their ends."""
    places = range(len(names))
    bars = axes.barh(places, values, color=colours, height=min(0.8, 0.25 * len(names)))
    if labels:
        axes.bar_label(bars, labels=labels, padding=3, color=colour("ink"))
    axes.set_yticks(places, names, parse_math=False)
    axes.invert_yaxis()
    plain_axes(axes, values_along="x")


def _bars_up(axes: Axes, names: Sequence[str], values: Sequence[float], fill: str) -> None:
    axes.bar(names, values, color=fill)
    axes.set_xlim(-0.6, max(len(names), _FEWEST_SLOTS) - 0.4)
    axes.yaxis.set_major_locator(_few_ticks(4))
    plain_axes(axes, values_along="y")


def _count_along(axes: Axes, numbers: Sequence[int], things: str, narrow: bool) -> None:
    """Leave room for the labels of bars, and count things along their axis."""
    axes.set_xlim(0, (1.45 if narrow else 1.15) * max(1, *numbers))
    axes.set_xlabel(things)
    _count_ticks(axes.xaxis, 3 if narrow else 6)


def _count_ticks(axis: Axis, most: int) -> None:
    axis.set_major_locator(_few_ticks(most))
    axis.set_major_formatter(short_number)


def _few_ticks(most: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True)


def _bin_name(low: int, high: int) -> str:
    return count(low) if high == low + 1 else f"{short_number(low)} to {short_number(high - 1)}"


def _bar_name(value: str) -> str:
    """A text of the spec as the name of a bar."""
    return clipped(value if value.isprintable() else repr(value), _MAX_BAR_NAME)
