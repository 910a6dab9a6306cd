"""The run report as one self-contained HTML page, without scripts, fonts or network access."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any, Final

from batchllm_operator.report.drawing import can_draw
from batchllm_operator.report.pages import Trail, render
from batchllm_operator.report.plots import (
    histogram_plot,
    saving_plot,
    shard_plot,
    token_plot,
    value_plot,
)
from batchllm_operator.report.timeline_plots import timeline_plot
from batchllm_operator.stored_plan.run_report import RunReport

_NUM_SLOWEST: Final = 10
_MOST_KEPT: Final = 16
"""Reports whose plots are cached, some 300 kB each, for several viewers in Airflow."""


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
        can_draw=can_draw(),
    )


@lru_cache(maxsize=_MOST_KEPT)
def _draw(report_json: str) -> dict[str, Any]:
    """The plots for which a report has data, by the page's names for them.

    Each takes tenths of a second, one at a time per process.
    """
    report = RunReport.model_validate_json(report_json)
    lengths, degrees = report.sharing.prefix_lengths, report.sharing.share_degrees
    return {
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
