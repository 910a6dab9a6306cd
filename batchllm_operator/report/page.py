"""The run report as one self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from markupsafe import Markup

from batchllm_operator.report.drawing import Plot, can_draw
from batchllm_operator.report.pages import Trail, render
from batchllm_operator.report.plots import (
    degree_plot,
    length_plot,
    saving_plot,
    shard_plot,
    token_plot,
    value_plot,
)
from batchllm_operator.report.timeline_plots import timeline_plot
from batchllm_operator.stored_plan.run_report import RunReport, Timeline

_NUM_SLOWEST: Final = 10
_MOST_KEPT: Final = 16
"""Reports whose plots are cached, some 300 kB each, for several viewers in Airflow."""


@dataclass(frozen=True, slots=True)
class _Plots:
    """The plots for which a report has data."""

    saving: Plot
    tokens: Plot | None
    values: tuple[Plot, ...]
    """Rows by label or choice."""
    timelines: tuple[tuple[Timeline, Plot], ...]
    lengths: Plot | None
    degrees: Plot | None
    shards: Plot | None


def render_report(report: RunReport, *, trail: Trail = (), actions: Trail = ()) -> str:
    """The page of a run report; equal reports give equal pages.

    For `trail` and `actions` see `pages.render`.
    """
    return render(
        "report.html.j2",
        trail=trail,
        actions=actions,
        report=report,
        plots=_draw(report.model_dump_json()),
        slowest=heapq.nlargest(_NUM_SLOWEST, report.shards, key=lambda shard: shard.done.engine_s),
        svg=_svg,
        can_draw=can_draw(),
    )


@lru_cache(maxsize=_MOST_KEPT)
def _draw(report_json: str) -> _Plots:
    """Draw a report's plots; each takes tenths of a second, one at a time per process."""
    report = RunReport.model_validate_json(report_json)
    lengths, degrees = report.sharing.prefix_lengths, report.sharing.share_degrees
    return _Plots(
        saving=saving_plot(report),
        tokens=token_plot(report.done) if report.plan.num_requests else None,
        values=tuple(
            value_plot(column, counts) for column, counts in report.answers.counts.items() if counts
        ),
        timelines=tuple((line, timeline_plot(line)) for line in report.timelines),
        lengths=length_plot(lengths) if lengths.counts else None,
        degrees=degree_plot(degrees) if degrees.counts else None,
        shards=shard_plot(report.shards) if len(report.shards) > 1 else None,
    )


def _svg(plot: Plot, shape: str) -> Markup:
    """A plot's picture, which is safe: it has no text from tables or prompts, and labels as
    matplotlib escapes them."""
    return Markup(plot.narrow if shape == "narrow" else plot.wide)
