"""The run report as one self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import heapq
from typing import Final

from batchllm_operator.report.pages import Trail, render
from batchllm_operator.report.plots import (
    histogram_plot,
    saving_plot,
    shard_plot,
    timeline_plot,
    token_plot,
    value_plot,
)
from batchllm_operator.stored_plan.run_report import RunReport

_NUM_SLOWEST: Final = 10


def render_report(report: RunReport, *, trail: Trail = (), actions: Trail = ()) -> str:
    """The page of a run report, with the plots for which it has data; a function of the report.

    For `trail` and `actions` see `pages.render`.
    """
    lengths, degrees = report.sharing.prefix_lengths, report.sharing.share_degrees
    plots = {
        "saving": saving_plot(report),
        "tokens": token_plot(report.done) if report.plan.num_requests else None,
        "answers": [
            value_plot(column, counts) for column, counts in report.answers.counts.items() if counts
        ],
        "timelines": [(line, timeline_plot(line)) for line in report.timelines],
        "lengths": histogram_plot(
            lengths, "Prefix lengths", "tokens of the shared prefix", "groups", "prefix"
        ),
        "degrees": histogram_plot(
            degrees, "Share degrees", "requests that share the prefix", "requests", "decode"
        ),
        "shards": shard_plot(report.shards) if len(report.shards) > 1 else None,
    }
    slowest = heapq.nlargest(_NUM_SLOWEST, report.shards, key=lambda shard: shard.done.engine_s)
    return render(
        "report.html.j2", trail=trail, actions=actions, report=report, plots=plots, slowest=slowest
    )
