"""The run report as one self-contained HTML page, without scripts, fonts or network access.

Its templates draw the numbers here, with words and a table for each picture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.sharing import Histogram
from batchllm_operator.report.charts import WIDTH, boxes, gantt, tree_rows
from batchllm_operator.report.pages import Trail, count, duration, ratio, render, usd
from batchllm_operator.report.timelines import TOKEN_STACK, VALLEY_BIN
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.timeline import Timeline

_NUM_SLOWEST: Final = 10
_TABLE_POINTS: Final = 24
"""Rows of a timeline's table."""


Area = tuple[str, str, str]
"""Something over time: its label, its colour (one of the page's CSS variables), and an SVG path in
which x is the bin, and y falls from 100 to 0."""


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
    """The numbers of a picture of bars or of panels."""

    rows: Sequence[Sequence[str]]
    """As text; the first cell of a row is its name."""
    values: Sequence[float] = ()
    """Lengths of bars, one for each row, of which the first 40 are drawn."""
    panels: Sequence[Panel] = ()

    @property
    def largest(self) -> Sequence[str]:
        """The row with the longest bar."""
        return self.rows[int(np.argmax(self.values))]


def render_report(report: RunReport, *, trail: Trail = (), actions: Trail = ()) -> str:
    """The page of a run report, with the plots for which it has data; a function of the report.

    For `trail` and `actions` see `pages.render`.
    """
    done, sharing = report.done, report.sharing
    by_time = sorted(report.shards, key=lambda shard: -shard.done.engine_s)
    savings = {
        "optimal": report.optimal_saving,
        "planned": report.planned_saving,
        "achieved": report.achieved_saving,
    }
    kinds = {
        "prompt, of duplicate rows": done.num_duplicate_tokens,
        "prompt, found in the KV cache": done.num_cached_tokens,
        "prompt, computed": done.num_computed_tokens,
        "output": done.num_output_tokens,
    }
    plots = {
        "saving": Plot(
            [(name, ratio(value)) for name, value in savings.items()],
            [value or 0.0 for value in savings.values()],
        ),
        "tokens": _plot_shares(kinds) if report.plan.num_requests else None,
        "answers": [
            (column, _plot_shares(counts))
            for column, counts in report.answers.counts.items()
            if counts
        ],
        "timelines": [(line, _timeline_plot(line)) for line in report.timelines],
        "lengths": _histogram_plot(sharing.prefix_lengths),
        "degrees": _histogram_plot(sharing.share_degrees),
        "costs": _cost_plot(report),
        "work": gantt(report.work),
        "tree": Plot(tree_rows(sharing.tree)) if sharing.tree else None,
    }
    values = {
        "report": report,
        "plots": plots,
        "boxes": list(boxes(sharing.tree)),
        "failed": [
            (kind, list(rows))
            for kind, rows in groupby(report.failed_rows, key=lambda row: row.kind)
        ],
        "width": WIDTH,
        "slowest": by_time[:_NUM_SLOWEST],
    }
    return render("report.html.j2", trail=trail, actions=actions, **values)


def _plot_shares(counts: Mapping[str, int]) -> Plot:
    """Bars of parts of a whole: name, count, and share of all."""
    total = max(1, sum(counts.values()))
    rows = [(name, count(number), ratio(number / total)) for name, number in counts.items()]
    return Plot(rows, list(counts.values()))


def _cost_plot(report: RunReport) -> Plot | None:
    """Bars of what each partition cost, in money or, without a price, in GPU time.

    None without partitions before, or if no GPU time is known.
    """
    runs = [*report.earlier, report.as_earlier()]
    if len(runs) == 1 or all(run.gpu_s is None for run in runs):
        return None
    has_price = any(run.cost_usd is not None for run in runs)
    rows = [
        (
            run.ds,
            usd(run.cost_usd) if has_price else duration(run.gpu_s),
            usd(run.usd_per_1000_rows),
            usd(run.unshared_usd),
            duration(run.gpu_s),
            count(run.num_rows),
            count(run.num_failed_rows),
            ratio(run.achieved_saving),
        )
        for run in runs
    ]
    return Plot(rows, [(run.cost_usd if has_price else run.gpu_s) or 0.0 for run in runs])


def _histogram_plot(histogram: Histogram) -> Plot | None:
    """Bars of numbers of things by size; None if there are none."""
    names = [
        count(low) if high == low + 1 else f"{count(low)} to {count(high - 1)}"
        for low, high in pairwise(histogram.edges)
    ]
    rows = list(zip(names, map(count, histogram.counts), strict=True))
    return Plot(rows, histogram.counts) if rows else None


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
    limit_y = round(100 - 100 * line.chunk_size / highest, 1)
    in_use = [_area(label, colour, np.array(shares)) for label, colour, shares in kv if any(shares)]
    panels = (
        Panel(heading, num_bins, areas, limit_y),
        Panel("Share of the KV blocks", num_bins, in_use),
    )
    return Plot(_timeline_rows(line), panels=panels)


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
    return label, colour, f"M0 100{steps}V100Z"
