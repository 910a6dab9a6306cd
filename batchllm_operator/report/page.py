"""The run report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import heapq

from markupsafe import Markup

from batchllm_operator.report.drawing import Plot
from batchllm_operator.report.pages import Trail, render
from batchllm_operator.report.plots import (
    degree_plot,
    length_plot,
    saving_plot,
    shard_plot,
    timeline_plot,
    token_plot,
)
from batchllm_operator.report.run_report import RunReport

_NUM_SLOWEST = 10


def render_report(report: RunReport, *, trail: Trail = ()) -> str:
    """The page of a run report. The same report gives the same page.

    Args:
        report: of any version that can be read; older ones show less.
        trail: see `pages.render`.
    """
    sharing = report.sharing
    return render(
        "report.html.j2",
        trail=trail,
        report=report,
        saving=saving_plot(report),
        tokens=token_plot(report.tokens) if report.tokens is not None else None,
        timelines=[(line, timeline_plot(line)) for line in report.timelines],
        lengths=length_plot(sharing.prefix_lengths)
        if sharing is not None and sharing.prefix_lengths.counts
        else None,
        degrees=degree_plot(sharing.share_degrees)
        if sharing is not None and sharing.share_degrees.counts
        else None,
        shards=shard_plot(report.shards) if len(report.shards) > 1 else None,
        slowest=heapq.nlargest(_NUM_SLOWEST, report.shards, key=lambda shard: shard.engine_s),
        svg=_svg,
    )


def _svg(plot: Plot, shape: str) -> Markup:
    """A plot's picture. Nothing in one comes from a table or a prompt: plots escape their words."""
    return Markup(plot.narrow if shape == "narrow" else plot.wide)
