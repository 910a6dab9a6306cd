"""What live pages and trends show, from given data; reads neither database nor lake."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from batchllm_operator.report.pages import Trail, mean, ratio, render, usd
from batchllm_operator.secrets import Masker
from batchllm_operator.shards.status import JobStatus, ShardStatus
from batchllm_operator.web.jobs import Job, JobState
from batchllm_operator.web.links import Links
from batchllm_operator.web.runs import JobRun

_EVERY_MS: Final = 5000
"""Milliseconds between two polls of a live page."""


@dataclass(frozen=True, slots=True)
class LivePage:
    """A page with a fragment that a script replaces until the DAG run has ended."""

    job: JobRun
    url: str
    trail: Trail
    heading: str
    template: str
    values: Mapping[str, Any]

    def fragment(self) -> str:
        return render(self.template, is_final=self.job.has_ended, **self.values)

    def page(self, nonce: str) -> str:
        return render(
            "web_live.html.j2",
            trail=self.trail,
            heading=self.heading,
            fragment=self.template,
            live_url="" if self.job.has_ended else f"{self.url}/live",
            dag_id=self.job.ref.dag_id,
            run_id=self.job.ref.run_id,
            nonce=nonce,
            every_ms=_EVERY_MS,
            is_final=self.job.has_ended,
            **self.values,
        )


def live_job(job: JobRun, stage: JobState, status: JobStatus | None, links: Links) -> LivePage:
    """The page of a running job; `status` is None before there is a plan."""
    share, summary = 0.0, stage.text
    if status is not None:
        share = _share(status.done.num_rows, status.num_rows)
        if not stage.is_failed:
            summary = f"{summary}, {_tenths(share)} of the {status.unit}s are done"
    values = {
        "stage": stage,
        "status": status,
        "share": share,
        "summary": f"{summary[:1].upper()}{summary[1:]}.",
        "masked": Masker.of(os.environ),
        "ref": job.ref,
        "links": links,
    }
    url, trail = links.job(job.ref), links.trail(job.ref)
    template = "web_job_live.html.j2"
    return LivePage(job, url, trail, job.title, template, values)


def live_shard(job: JobRun, shard: ShardStatus, links: Links) -> LivePage:
    share = _share(shard.done.num_rows, shard.num_rows)
    values = {
        "shard": shard,
        "share": share,
        "summary": f"{shard.state.capitalize()}, {_tenths(share)} of the rows are done.",
        "masked": Masker.of(os.environ),
    }
    url = links.job_shard(job.ref, shard.shard_idx)
    trail = (*links.trail(job.ref), (job.title, links.job(job.ref)))
    heading = f"Shard {shard.shard_idx} of {job.title}"
    return LivePage(job, url, trail, heading, "web_shard_live.html.j2", values)


def _share(num_done: int, num_rows: int) -> float:
    return num_done / num_rows if num_rows else 1.0


def _tenths(share: float) -> str:
    """In steps of ten, because a screen reader reads each change aloud."""
    return f"{int(share * 10) * 10} %"


def trends(job: Job) -> list[tuple[str, list[float], str]]:
    """Measures of a job's outcomes over its partitions, if at least two values are known.

    Each is a name, columns of which the highest is 1 (0 where a value is unknown), the earliest
    partition first, and the picture in words.
    """
    measures: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("Prompt tokens saved", "Prompt tokens saved", "achieved_saving_ratio", ratio),
        ("Rows/s", "Rows per second", "rows_per_s", mean),
        ("Cost", "Cost", "cost_usd", usd),
    )
    listed = []
    for name, what, key, shown in measures:
        values = [run.number(key) for run in job.by_partition.values()]
        known = [value for value in values if value is not None]
        if len(known) < 2:
            continue
        low, high = min(known), max(known)
        spread = (high - low) or 1.0
        text = (
            f"{what} of the last {len(values)} partitions: from {shown(known[0])} to"
            f" {shown(known[-1])}, between {shown(low)} and {shown(high)}"
        )
        if len(known) < len(values):
            text += f"; unknown for {len(values) - len(known)}"
        heights = [0.0 if value is None else 0.1 + 0.9 * (value - low) / spread for value in values]
        listed.append((name, heights, text))
    return listed
