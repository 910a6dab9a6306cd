"""The plots of a run report (paper, Fig. 2 and 6 for the timeline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from batchllm_operator.amounts import counted
from batchllm_operator.prefixes.sharing import Histogram
from batchllm_operator.report.drawing import Plot, Table, colour, draw, plain_axes
from batchllm_operator.report.pages import count, duration, ratio
from batchllm_operator.stored_plan.run_report import RunReport, ShardRun, Timeline, TokenKinds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_MOST_BARS: Final = 40
_MAX_BAR_NAME: Final = 24
_VALLEY_BIN: Final = 0.5
"""A bin is shaded from this share of its time in valleys on."""
_FEWEST_SLOTS: Final = 8
"""Minimum of bars that an axis has room for, so that a single one isn't as wide as the page."""
_TABLE_POINTS: Final = 24
_KINDS: Final = (
    ("decode", "num_decode_tokens", "decode"),
    ("distinct", "num_distinct_tokens", "prefill, distinct"),
    ("prefix", "num_prefix_tokens", "prefill, prefix"),
)


def saving_plot(report: RunReport) -> Plot:
    """Optimal, planned and achieved saving ratio."""
    values = {
        "optimal": report.optimal_saving,
        "planned": report.planned_saving,
        "achieved": report.achieved_saving,
    }
    shown = [ratio(value) for value in values.values()]
    lengths = [100 * (value or 0.0) for value in values.values()]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        colours = [colour("line"), colour("decode"), colour("prefix")]
        bars = axes.barh(list(values), lengths, color=colours)
        axes.bar_label(bars, labels=shown, padding=3, color=colour("ink"))
        axes.invert_yaxis()
        low = min(0.0, *lengths)
        axes.set_xlim(1.15 * low, 118 if narrow else 108)
        axes.set_xlabel("% of prompt tokens saved")
        plain_axes(axes, values_along="x")

    return draw(
        "Prompt tokens saved",
        "Bars of the share of prompt tokens that needn't be computed: "
        + ", ".join(f"{text} {name}" for name, text in zip(values, shown, strict=True)),
        Table(("Saving", "Share of prompt tokens"), list(zip(values, shown, strict=True))),
        paint,
        wide_height=1.5,
        narrow_height=1.6,
    )


def token_plot(tokens: TokenKinds) -> Plot:
    kinds = (
        ("saved", "prompt, of duplicate rows", tokens.num_duplicate),
        ("prefix", "prompt, found in the KV cache", tokens.num_cached),
        ("distinct", "prompt, computed", tokens.num_computed),
        ("decode", "output", tokens.num_output),
    )
    total = max(1, tokens.num_logical + tokens.num_output)

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        bars = axes.barh(
            [name for _, name, _ in kinds],
            [value for _, _, value in kinds],
            color=[colour(each) for each, _, _ in kinds],
        )
        axes.bar_label(bars, labels=[count(value) for _, _, value in kinds], padding=3)
        axes.invert_yaxis()
        axes.set_xlim(0, (1.45 if narrow else 1.15) * max(1, *(value for _, _, value in kinds)))
        axes.xaxis.set_major_locator(_few_ticks(3 if narrow else 6))
        axes.xaxis.set_major_formatter(_short_number)
        axes.set_xlabel("tokens")
        plain_axes(axes, values_along="x")

    return draw(
        "Tokens by kind",
        "Bars of tokens: " + ", ".join(f"{count(value)} {name}" for _, name, value in kinds),
        Table(
            ("Kind", "Tokens", "Share"),
            [(name, count(value), ratio(value / total)) for _, name, value in kinds],
        ),
        paint,
        wide_height=1.9,
        narrow_height=2.1,
    )


def value_plot(column: str, counts: Mapping[str, int]) -> Plot:
    """Rows by value of a column, such as its labels; `counts` has the most frequent first."""
    shown = list(counts.items())[:_MOST_BARS]
    names = [_bar_name(value) for value, _ in shown]
    numbers = [number for _, number in shown]
    total = max(1, sum(counts.values()))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        places = range(len(names))
        bars = axes.barh(places, numbers, color=colour("prefix"), height=0.7)
        axes.bar_label(bars, labels=[ratio(number / total) for number in numbers], padding=3)
        axes.set_yticks(places, names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, (1.45 if narrow else 1.15) * max(1, *numbers))
        axes.xaxis.set_major_locator(_few_ticks(3 if narrow else 6))
        axes.xaxis.set_major_formatter(_short_number)
        axes.set_xlabel("rows")
        plain_axes(axes, values_along="x")

    height = 0.24 * len(names) + 0.9
    return draw(
        f"Rows by {column}",
        f"Bars of rows by {column}: {counted(len(counts), 'value')}, most of the rows,"
        f" {ratio(numbers[0] / total)}, with {names[0]}",
        Table(
            (column.capitalize(), "Rows", "Share"),
            [(value, count(number), ratio(number / total)) for value, number in counts.items()],
        ),
        paint,
        wide_height=height,
        narrow_height=height,
    )


def timeline_plot(line: Timeline) -> Plot:
    def paint(figure: Figure, narrow: bool) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
        edges = np.arange(len(line.kv_used) + 1) * line.bin_s
        _paint_tokens(upper, line, edges)
        lower.stairs(
            100 * np.array(line.kv_used), edges, fill=True, color=colour("saved"), label="in use"
        )
        lower.stairs(
            100 * np.array(line.kv_held), edges, fill=True, color=colour("limit"), label="held"
        )
        lower.set_ylim(0, 105)
        lower.set_ylabel("% of KV blocks")
        lower.set_xlabel("seconds since the first step")
        lower.set_xlim(0, edges[-1])
        handles, labels = upper.get_legend_handles_labels()
        more, others = lower.get_legend_handles_labels()
        figure.legend(
            [*handles, *more],
            [*labels, *(f"KV {each}" for each in others)],
            loc="outside upper left",
            ncols=2 if narrow else 7,
        )

    limit = f"chunk size {count(line.chunk_size)}" if line.chunk_size else "chunk size unknown"
    alt = (
        f"Tokens of each step over {duration(line.duration_s)}, {counted(line.num_steps, 'step')},"
        f" {limit}: {ratio(line.valley_share)} of the time in valleys; the KV cache is"
        f" {ratio(max(line.kv_used))} full at most"
    )
    return draw(
        f"Token batches of {line.name}",
        alt,
        _timeline_table(line),
        paint,
        wide_height=3.6,
        narrow_height=3.9,
    )


def length_plot(found: Histogram) -> Plot:
    return _histogram_plot(
        found, "Prefix lengths", "tokens of the shared prefix", "groups", colour("prefix")
    )


def degree_plot(found: Histogram) -> Plot:
    return _histogram_plot(
        found, "Share degrees", "requests that share the prefix", "requests", colour("decode")
    )


def shard_plot(shards: Sequence[ShardRun]) -> Plot:
    slowest = sorted(shards, key=lambda each: -each.engine_s)[:_MOST_BARS]
    names = [str(each.shard_idx) for each in slowest]

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.bar(names, [each.engine_s for each in slowest], color=colour("distinct"))
        axes.set_xlim(-0.6, max(len(names), _FEWEST_SLOTS) - 0.4)
        if len(names) > (8 if narrow else 30):
            axes.set_xticks(axes.get_xticks()[:: 5 if narrow else 2])
        axes.yaxis.set_major_locator(_few_ticks(4))
        axes.set_ylabel("seconds")
        axes.set_xlabel("shard")
        plain_axes(axes, values_along="y")

    seconds = np.array([each.engine_s for each in shards])
    return draw(
        "Seconds of generating, by shard",
        f"Bars of the {len(slowest)} slowest of {counted(len(shards), 'shard')}: the slowest took"
        f" {duration(float(seconds.max()))}, an average one {duration(float(seconds.mean()))}",
        Table(
            ("Shard", "Generating", "Rows", "Computed tokens/s", "Output tokens/s"),
            [
                (
                    str(each.shard_idx),
                    duration(each.engine_s),
                    count(each.num_rows),
                    count(each.computed_tokens_per_s),
                    count(each.output_tokens_per_s),
                )
                for each in slowest
            ],
        ),
        paint,
        wide_height=2.0,
        narrow_height=2.2,
    )


def _histogram_plot(found: Histogram, title: str, sizes: str, things: str, fill: str) -> Plot:
    names = [_bin_name(low, high) for low, high in zip(found.edges, found.edges[1:], strict=False)]
    most = int(np.argmax(found.counts))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        if narrow:
            axes.barh(names, found.counts, color=fill, height=min(0.8, 0.25 * len(names)))
            axes.set_ylabel(sizes)
            axes.set_xlabel(things)
            axes.xaxis.set_major_locator(_few_ticks(4))
            axes.xaxis.set_major_formatter(_short_number)
            axes.invert_yaxis()
            plain_axes(axes, values_along="x")
            return
        axes.bar(names, found.counts, color=fill)
        axes.set_xlim(-0.6, max(len(names), _FEWEST_SLOTS) - 0.4)
        axes.set_xlabel(sizes)
        axes.set_ylabel(things)
        axes.yaxis.set_major_locator(_few_ticks(4))
        axes.yaxis.set_major_formatter(_short_number)
        plain_axes(axes, values_along="y")

    return draw(
        title,
        f"Bars of {things} by {sizes}: {count(sum(found.counts))} {things} in all, most of them,"
        f" {count(found.counts[most])}, with {names[most]}",
        Table(
            (sizes.capitalize(), things.capitalize()),
            [(name, count(number)) for name, number in zip(names, found.counts, strict=True)],
        ),
        paint,
        wide_height=2.2,
        narrow_height=max(2.3, 0.24 * len(names) + 0.8),
    )


def _paint_tokens(axes: Axes, line: Timeline, edges: np.ndarray) -> None:
    bottom = np.zeros(len(edges) - 1)
    for name, attribute, label in _KINDS:
        top = bottom + np.array(getattr(line, attribute))
        axes.stairs(top, edges, baseline=bottom, fill=True, color=colour(name), label=label)
        bottom = top
    valleys = np.array(line.valley) >= _VALLEY_BIN
    if valleys.any():
        full = np.where(valleys, 2.0 * max(line.chunk_size or 0, float(bottom.max()), 1), 0.0)
        axes.stairs(
            full, edges, fill=True, color=colour("muted"), alpha=0.18, zorder=0, label="valley"
        )
    if line.chunk_size is not None:
        axes.axhline(
            line.chunk_size, color=colour("limit"), linestyle="--", linewidth=1, label="chunk size"
        )
    axes.set_ylabel("tokens per step")
    axes.yaxis.set_major_formatter(_short_number)
    axes.set_ylim(0, 1.08 * max(line.chunk_size or 0, float(bottom.max()), 1))


def _timeline_table(line: Timeline) -> Table:
    """The timeline in at most `_TABLE_POINTS` rows."""
    every = -(-len(line.kv_used) // _TABLE_POINTS)
    rows = []
    for start in range(0, len(line.kv_used), every):
        chosen = slice(start, start + every)
        means = (np.mean(getattr(line, attribute)[chosen]) for _, attribute, _ in _KINDS)
        rows.append(
            (
                f"{start * line.bin_s:,.1f} s",
                *(count(float(mean)) for mean in means),
                ratio(max(line.kv_used[chosen])),
                ratio(max(line.kv_held[chosen])),
                ratio(float(np.mean(line.valley[chosen]))),
            )
        )
    names = (label.capitalize() for _, _, label in _KINDS)
    return Table(("From", *names, "KV in use, at most", "KV held, at most", "In valleys"), rows)


def _bin_name(low: int, high: int) -> str:
    return count(low) if high == low + 1 else f"{_short_number(low)} to {_short_number(high - 1)}"


def _bar_name(value: str) -> str:
    """A text of the spec as the name of a bar."""
    text = value if value.isprintable() else repr(value)
    return text if len(text) <= _MAX_BAR_NAME else text[: _MAX_BAR_NAME - 1] + "…"


def _short_number(value: float, position: float = 0.0) -> str:
    """Numbers for axes, such as `950`, `12 k`, `3.5 M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:,.3g} {unit}"
    return f"{value:,.4g}"


def _few_ticks(most: int) -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True)
