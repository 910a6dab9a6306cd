"""The run report as one self-contained HTML page, without scripts, fonts or network access.

Its templates draw the pictures here, each with its words and its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.amounts import counted
from batchllm_operator.prefixes.sharing import Histogram
from batchllm_operator.report.pages import Trail, bar_name, count, duration, ratio, render
from batchllm_operator.report.timelines import TOKEN_STACK, VALLEY_BIN
from batchllm_operator.stored_plan.counts import Counts
from batchllm_operator.stored_plan.run_report import RunReport, ShardRun, Timeline

_NUM_SLOWEST: Final = 10
_MOST_BARS: Final = 40
_TABLE_POINTS: Final = 24
"""Rows of a timeline's table."""


@dataclass(frozen=True, slots=True)
class Area:
    """Something over time: an SVG path in which x is the bin, and y falls from 100 to 0."""

    label: str
    colour: str
    path: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Areas over the same time, each in front of those before it."""

    heading: str
    num_bins: int
    areas: Sequence[Area]
    limit_y: float | None = None
    """Where a dashed line is."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture of bars or of panels, with a text and a table as alternatives."""

    title: str
    alt: str
    """The picture in words."""
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The numbers behind the picture; the first cell of a row is its name."""
    values: Sequence[float] = ()
    """Lengths of bars, one for each row, of which the first are drawn."""
    colours: Sequence[str] = ()
    """Of the bars, by turns."""
    longest: float | None = None
    """A bar that fills the width; None for the longest of them."""
    label: int = 1
    """The cell beside a bar."""
    panels: Sequence[Panel] = ()
    duration: str = ""


def render_report(report: RunReport, *, trail: Trail = (), actions: Trail = ()) -> str:
    """The page of a run report, with the plots for which it has data; a function of the report.

    For `trail` and `actions` see `pages.render`.
    """
    lengths, degrees = report.sharing.prefix_lengths, report.sharing.share_degrees
    plots = {
        "saving": _saving_plot(report),
        "tokens": _token_plot(report.done) if report.plan.num_requests else None,
        "answers": [
            _value_plot(column, counts)
            for column, counts in report.answers.counts.items()
            if counts
        ],
        "timelines": [(line, _timeline_plot(line)) for line in report.timelines],
        "lengths": _histogram_plot(
            lengths, "Prefix lengths", "tokens of the shared prefix", "groups", "prefix"
        ),
        "degrees": _histogram_plot(
            degrees, "Share degrees", "requests that share the prefix", "requests", "decode"
        ),
        "shards": _shard_plot(report.shards) if len(report.shards) > 1 else None,
    }
    slowest = nlargest(_NUM_SLOWEST, report.shards, key=lambda shard: shard.done.engine_s)
    return render(
        "report.html.j2", trail=trail, actions=actions, report=report, plots=plots, slowest=slowest
    )


def _saving_plot(report: RunReport) -> Plot:
    values = {
        "optimal": report.optimal_saving,
        "planned": report.planned_saving,
        "achieved": report.achieved_saving,
    }
    rows = [(name, ratio(value)) for name, value in values.items()]
    return Plot(
        "Prompt tokens saved",
        "Bars of the share of prompt tokens that needn't be computed: "
        + ", ".join(f"{text} {name}" for name, text in rows),
        ("Saving", "Share of prompt tokens"),
        rows,
        [value or 0.0 for value in values.values()],
        ("muted", "decode", "prefix"),
        longest=1.0,
    )


def _token_plot(done: Counts) -> Plot:
    """Where the tokens of a run went; prompt tokens, but for the last kind."""
    kinds = {
        "prompt, of duplicate rows": done.num_duplicate_tokens,
        "prompt, found in the KV cache": done.num_cached_tokens,
        "prompt, computed": done.num_computed_tokens,
        "output": done.num_output_tokens,
    }
    rows = _shares(kinds)
    return Plot(
        "Tokens by kind",
        "Bars of tokens: " + ", ".join(f"{number} {name}" for name, number, _ in rows),
        ("Kind", "Tokens", "Share"),
        rows,
        list(kinds.values()),
        ("saved", "prefix", "distinct", "decode"),
    )


def _value_plot(column: str, counts: Mapping[str, int]) -> Plot:
    """Rows by value of a column, such as its labels; `counts` has the most frequent first."""
    rows = _shares(counts)
    return Plot(
        f"Rows by {column}",
        f"Bars of rows by {column}: {counted(len(counts), 'value')}, most of the rows,"
        f" {rows[0][2]}, with {bar_name(rows[0][0])}",
        (column.capitalize(), "Rows", "Share"),
        rows,
        list(counts.values()),
        ("prefix",),
        label=2,
    )


def _shard_plot(shards: Sequence[ShardRun]) -> Plot:
    slowest = sorted(shards, key=lambda shard: -shard.done.engine_s)[:_MOST_BARS]
    rows = [
        (
            str(shard.shard_idx),
            duration(shard.done.engine_s),
            count(shard.done.num_rows),
            count(shard.done.computed_tokens_per_s),
            count(shard.done.output_tokens_per_s),
        )
        for shard in slowest
    ]
    mean_s = fmean(shard.done.engine_s for shard in shards)
    return Plot(
        "Seconds of generating, by shard",
        f"Bars of the {len(slowest)} slowest of {counted(len(shards), 'shard')}: the slowest took"
        f" {rows[0][1]}, an average one {duration(mean_s)}",
        ("Shard", "Generating", "Rows", "Computed tokens/s", "Output tokens/s"),
        rows,
        [shard.done.engine_s for shard in slowest],
        ("distinct",),
    )


def _histogram_plot(
    histogram: Histogram, title: str, sizes: str, things: str, colour: str
) -> Plot | None:
    """`things` by size; None if there are none."""
    if not histogram.counts:
        return None
    names = [
        count(low) if high == low + 1 else f"{count(low)} to {count(high - 1)}"
        for low, high in pairwise(histogram.edges)
    ]
    rows = list(zip(names, map(count, histogram.counts), strict=True))
    name, most = rows[int(np.argmax(histogram.counts))]
    return Plot(
        title,
        f"Bars of {things} by {sizes}: {count(sum(histogram.counts))} {things} in all, most of"
        f" them, {most}, with {name}",
        (sizes.capitalize(), things.capitalize()),
        rows,
        histogram.counts,
        (colour,),
    )


def _timeline_plot(line: Timeline) -> Plot:
    """What the steps of an engine compute, and the KV blocks in use (paper, Fig. 2 and 6)."""
    tops = np.cumsum([getattr(line, attribute) for attribute, _, _ in TOKEN_STACK], axis=0)
    highest = 1.08 * max(line.chunk_size, float(tops.max()), 1.0)
    valleys = np.where(np.array(line.valley) >= VALLEY_BIN, highest, 0.0)
    areas = [_area("valley", "line", valleys / highest)] if valleys.any() else []
    for (_, label, colour), top in reversed(list(zip(TOKEN_STACK, tops, strict=True))):
        areas.append(_area(label, colour, top / highest))
    kv = (("in use", "saved", line.kv_used), ("held", "limit", line.kv_held))
    num_bins = len(line.kv_used)
    heading = f"Tokens of a step; dashed, the chunk size of {count(line.chunk_size)}"
    return Plot(
        f"Token batches of {line.name}",
        f"Tokens of each step over {duration(line.duration_s)}, {counted(line.num_steps, 'step')},"
        f" chunk size {count(line.chunk_size)}: {ratio(line.valley_share)} of the time in valleys;"
        f" the KV cache is {ratio(max(line.kv_used))} full at most",
        (
            *("From", *(label.capitalize() for _, label, _ in TOKEN_STACK)),
            *("KV in use, at most", "KV held, at most", "In valleys"),
        ),
        _timeline_rows(line),
        panels=(
            Panel(heading, num_bins, areas, round(100 - 100 * line.chunk_size / highest, 1)),
            Panel(
                "Share of the KV blocks",
                num_bins,
                [
                    _area(label, colour, np.array(shares))
                    for label, colour, shares in kv
                    if any(shares)
                ],
            ),
        ),
        duration=duration(line.duration_s),
    )


def _timeline_rows(line: Timeline) -> list[tuple[str, ...]]:
    every = -(-len(line.kv_used) // _TABLE_POINTS)
    rows = []
    for start in range(0, len(line.kv_used), every):
        chosen = slice(start, start + every)
        means = (fmean(getattr(line, attribute)[chosen]) for attribute, _, _ in TOKEN_STACK)
        rows.append(
            (
                f"{start * line.bin_s:,.1f} s",
                *map(count, means),
                ratio(max(line.kv_used[chosen])),
                ratio(max(line.kv_held[chosen])),
                ratio(fmean(line.valley[chosen])),
            )
        )
    return rows


def _area(label: str, colour: str, shares: NDArray[np.float64]) -> Area:
    """Steps of these heights, as shares of the panel's."""
    steps = "".join(f"V{100 - 100 * share:.1f}H{end}" for end, share in enumerate(shares, start=1))
    return Area(label, colour, f"M0 100{steps}V100Z")


def _shares(counts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Name, count and share of all of each part."""
    total = max(1, sum(counts.values()))
    return [(name, count(number), ratio(number / total)) for name, number in counts.items()]
