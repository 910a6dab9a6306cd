"""Renders pages from given data; reads neither database nor lake."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from batchllm_operator.report.page import render_report
from batchllm_operator.report.pages import mean, ratio, render, usd
from batchllm_operator.secrets import Masker
from batchllm_operator.shards.status import JobStatus, ShardStatus
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.web.job_state import JobState
from batchllm_operator.web.jobs import Job
from batchllm_operator.web.links import Links
from batchllm_operator.web.runs import JobInRun, JobRef
from batchllm_operator.web.sparkline import Sparkline, sparkline

EVERY_MS: Final = 5000
"""Milliseconds between two polls of a live page."""
_MAX_NOTES: Final = 20


def jobs_page(jobs: list[Job], links: Links) -> str:
    return render("web_jobs.html.j2", jobs=jobs, links=links, trends=_trends)


def _trends(job: Job) -> list[tuple[str, Sparkline]]:
    """Named sparklines of a job's outcomes over its partitions."""
    plotted = job.by_partition.values()
    measures: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("Prompt tokens saved", "Prompt tokens saved", "achieved_saving_ratio", ratio),
        ("Rows/s", "Rows per second", "rows_per_s", mean),
        ("Cost", "Cost", "cost_usd", usd),
    )
    found = (
        (name, sparkline(what, [run.number(key) for run in plotted], shown))
        for name, what, key, shown in measures
    )
    return [(name, line) for name, line in found if line is not None]


def choice_page(jobs: list[JobInRun], dag_id: str, run_id: str, links: Links) -> str:
    trail = links.trail()
    return render(
        "web_choice.html.j2", trail=trail, jobs=jobs, links=links, dag_id=dag_id, run_id=run_id
    )


def message_page(heading: str, text: str, links: Links) -> str:
    return render("web_message.html.j2", trail=links.trail(), heading=heading, text=text)


def report_page(report: RunReport, ref: JobRef, links: Links) -> str:
    """A report with links to the pages above it and to its file."""
    actions = (("Download this report", links.report_file(ref)),)
    return render_report(report, trail=links.trail(ref), actions=actions)


@dataclass(frozen=True, slots=True)
class LiveJob:
    """The page of a running job."""

    job: JobInRun
    stage: JobState
    status: JobStatus | None
    is_final: bool
    """Whether the DAG run has ended, so that nothing changes any more."""

    @property
    def _values(self) -> dict[str, Any]:
        status, masker = self.status, Masker.of(os.environ)
        share = 0.0 if status is None else _share(status.done.num_rows, status.num_rows)
        summary = self.stage.text
        if status is not None and not self.stage.is_failed:
            summary = f"{self.stage.text}, {_tenths(share)} of the rows are done"
        return {
            "stage": self.stage,
            "status": status,
            "share": share,
            "summary": f"{summary[:1].upper()}{summary[1:]}.",
            "is_final": self.is_final,
            "notes": [masker(note) for note in status.notes[:_MAX_NOTES]] if status else [],
            "refused": self._refused(masker),
            "faults": self._faults(masker),
            "ref": self.job.ref,
        }

    def _refused(self, masker: Masker) -> str | None:
        """Why the last commit published nothing."""
        if self.status is None or self.status.refusal is None:
            return None
        return masker(self.status.refusal.reason)

    def _faults(self, masker: Masker) -> list[tuple[int, str]]:
        """Shards whose latest attempt has failed, and why."""
        shards = () if self.status is None else self.status.shards
        failed = [(shard.shard_idx, shard.error) for shard in shards if shard.state == "failed"]
        return [(idx, masker(error)) for idx, error in failed if error is not None][:_MAX_NOTES]

    def fragment(self, links: Links) -> str:
        return render("web_job_live.html.j2", links=links, **self._values)

    def page(self, links: Links, nonce: str) -> str:
        ref = self.job.ref
        return render(
            "web_live.html.j2",
            trail=links.trail(ref),
            heading=self.job.title,
            fragment="web_job_live.html.j2",
            live_url="" if self.is_final else links.live_job(ref),
            links=links,
            **_page_values(ref, nonce),
            **self._values,
        )


@dataclass(frozen=True, slots=True)
class LiveShard:
    """The page of a running shard."""

    job: JobInRun
    shard: ShardStatus
    is_final: bool

    @property
    def _values(self) -> dict[str, Any]:
        share = _share(self.shard.done.num_rows, self.shard.num_rows)
        return {
            "shard": self.shard,
            "share": share,
            "summary": f"{self.shard.state.capitalize()}, {_tenths(share)} of the rows are done.",
            "is_final": self.is_final,
            "error": None if self.shard.error is None else Masker.of(os.environ)(self.shard.error),
        }

    def fragment(self) -> str:
        return render("web_shard_live.html.j2", **self._values)

    def page(self, links: Links, nonce: str) -> str:
        ref, shard_idx = self.job.ref, self.shard.shard_idx
        return render(
            "web_live.html.j2",
            trail=(*links.trail(ref), (self.job.title, links.job(ref))),
            heading=f"Shard {shard_idx} of {self.job.title}",
            fragment="web_shard_live.html.j2",
            live_url="" if self.is_final else links.live_shard(ref, shard_idx),
            **_page_values(ref, nonce),
            **self._values,
        )


def _page_values(ref: JobRef, nonce: str) -> dict[str, Any]:
    return {"dag_id": ref.dag_id, "run_id": ref.run_id, "nonce": nonce, "every_ms": EVERY_MS}


def _share(num_done: int, num_rows: int) -> float:
    return num_done / num_rows if num_rows else 1.0


def _tenths(share: float) -> str:
    """In steps of ten, because a screen reader reads each change aloud."""
    return f"{int(share * 10) * 10} %"
