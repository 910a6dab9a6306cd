"""Pages as text, from what was found; nothing is read here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from batchllm_operator.artifacts.run_report import RunReport
from batchllm_operator.artifacts.status import JobStatus, ShardStatus
from batchllm_operator.report.page import render_report
from batchllm_operator.report.pages import count, ratio, render, usd
from batchllm_operator.spec import Masker
from batchllm_operator.web.job_state import JobState
from batchllm_operator.web.jobs import Job, JobRun
from batchllm_operator.web.links import Links
from batchllm_operator.web.runs import FAILED, JobInRun, JobRef
from batchllm_operator.web.sparkline import Sparkline, sparkline

EVERY_MS: Final = 5000
"""Milliseconds between a live page's questions for news."""
_MAX_NOTES: Final = 20


@dataclass(frozen=True, slots=True)
class RunView:
    """A run of a job as the list shows it."""

    run_id: str
    href: str
    partition: str
    is_planned: bool
    state: str
    is_failed: bool
    num_rows: float | None
    num_failed: float | None
    saving: float | None
    tokens_per_s: float | None
    gpu_s: float | None
    cost_usd: float | None
    predicted_gpu_s: float | None
    predicted_cost_usd: float | None
    before: str = ""
    """The partition that it can be compared with: the newest before its own with an outcome."""
    compare_href: str = ""
    """To that comparison; empty if there is none, or this run has no outcome."""

    @classmethod
    def of(cls, run: JobRun, links: Links, before: JobRun | None = None) -> RunView:
        """Take what is shown of a run."""
        return cls(
            run_id=run.job.ref.run_id,
            href=links.job(run.job.ref),
            partition=run.partition or "unknown",
            is_planned=run.is_planned,
            state=run.run_state,
            is_failed=run.run_state in FAILED,
            num_rows=run.number("num_rows_in"),
            num_failed=run.number("num_rows_failed"),
            saving=run.number("achieved_saving_ratio"),
            tokens_per_s=run.number("tokens_per_s"),
            gpu_s=run.number("gpu_s"),
            cost_usd=run.number("cost_usd"),
            predicted_gpu_s=run.number("predicted_gpu_s"),
            predicted_cost_usd=run.number("predicted_cost_usd"),
            before="" if before is None else before.partition or "",
            compare_href=links.comparison(before.job.ref, run.job.ref)
            if before is not None and run.outcome
            else "",
        )


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the list shows it."""

    name: str
    dag_id: str
    task_id: str
    href: str
    state: JobState
    latest: RunView
    shown: RunView
    """The run whose numbers are shown: of the newest partition that has some."""
    shown_note: str
    runs: tuple[RunView, ...]
    """The newest partition first, in it the latest attempt."""
    trends: tuple[tuple[str, Sparkline], ...]

    @classmethod
    def of(cls, job: Job, links: Links) -> JobView:
        """Take what is shown of a job."""
        partitions = job.by_partition
        runs = [RunView.of(run, links, _before(run, partitions.values())) for run in job.runs]
        latest, shown = RunView.of(job.latest, links), RunView.of(job.latest_done, links)
        plotted = [RunView.of(run, links) for run in partitions.values()]
        is_older = shown.saving is not None and shown.href != latest.href
        lines = (
            ("Saving ratio", sparkline("Saving ratio", [run.saving for run in plotted], ratio)),
            (
                "Tokens/s",
                sparkline("Tokens per second", [run.tokens_per_s for run in plotted], count),
            ),
            ("Cost", sparkline("Cost", [run.cost_usd for run in plotted], usd)),
        )
        return cls(
            name=job.name,
            dag_id=job.dag_id,
            task_id=job.task_id,
            href=latest.href,
            state=job.state,
            latest=latest,
            shown=shown,
            shown_note=f"as of {shown.partition}" if is_older else "",
            runs=tuple(reversed(runs)),
            trends=tuple((name, line) for name, line in lines if line is not None),
        )


def _before(run: JobRun, partitions: Iterable[JobRun]) -> JobRun | None:
    """The run of the newest partition before a run's own that has an outcome."""
    if run.partition is None:
        return None
    earlier = (
        each
        for each in partitions
        if each.outcome and each.partition is not None and each.partition < run.partition
    )
    return max(earlier, key=lambda each: each.partition or "", default=None)


def jobs_page(jobs: list[Job], links: Links) -> str:
    """The list of jobs."""
    return render("web_jobs.html.j2", jobs=[JobView.of(job, links) for job in jobs])


def choice_page(jobs: list[JobInRun], dag_id: str, run_id: str, links: Links) -> str:
    """The jobs of a run that has several."""
    rows = [
        {
            "href": links.job(job.ref),
            "title": job.title,
            "task_id": job.ref.task_id,
            "map_index": job.ref.map_index,
            "state": job.state,
        }
        for job in jobs
    ]
    trail = (("Jobs", links.jobs),)
    return render("web_choice.html.j2", trail=trail, jobs=rows, dag_id=dag_id, run_id=run_id)


def message_page(heading: str, text: str, links: Links) -> str:
    """Why a page can't be shown."""
    trail = (("Jobs", links.jobs),)
    return render("web_message.html.j2", trail=trail, heading=heading, text=text)


def report_page(report: RunReport, ref: JobRef, links: Links) -> str:
    """A report, with the pages that it is below of and the file to keep."""
    trail = (("Jobs", links.jobs), (f"Run {ref.run_id}", links.run(ref.dag_id, ref.run_id)))
    actions = (("Download this report", links.report_file(ref)),)
    return render_report(report, trail=trail, actions=actions)


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job while it runs."""

    job: JobInRun
    stage: JobState
    status: JobStatus | None
    """None before there is a plan."""
    is_final: bool
    """Whether the run of the DAG has ended, so that nothing changes any more."""

    @property
    def _values(self) -> dict[str, Any]:
        status, masker = self.status, Masker.of(os.environ)
        share = 0.0 if status is None else _share(status.num_rows_done, status.num_rows)
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
            "ref": self.job.ref,
        }

    def fragment(self, links: Links) -> str:
        """What changes."""
        return render("web_job_live.html.j2", links=links, **self._values)

    def page(self, links: Links, nonce: str) -> str:
        """The whole page; it asks for news unless the run has ended."""
        ref = self.job.ref
        trail = (("Jobs", links.jobs), (f"Run {ref.run_id}", links.run(ref.dag_id, ref.run_id)))
        return render(
            "web_live.html.j2",
            trail=trail,
            heading=self.job.title,
            fragment="web_job_live.html.j2",
            live_url="" if self.is_final else links.live_job(ref),
            links=links,
            **_page_values(ref, nonce),
            **self._values,
        )


@dataclass(frozen=True, slots=True)
class LiveShard:
    """A shard while it runs."""

    job: JobInRun
    shard: ShardStatus
    is_final: bool

    @property
    def _values(self) -> dict[str, Any]:
        share = _share(self.shard.num_rows_done, self.shard.num_rows)
        return {
            "shard": self.shard,
            "share": share,
            "summary": f"{self.shard.state.capitalize()}, {_tenths(share)} of the rows are done.",
            "is_final": self.is_final,
            "error": None if self.shard.error is None else Masker.of(os.environ)(self.shard.error),
        }

    def fragment(self) -> str:
        """What changes."""
        return render("web_shard_live.html.j2", **self._values)

    def page(self, links: Links, nonce: str) -> str:
        """The whole page; it asks for news unless the run has ended."""
        ref, shard_idx = self.job.ref, self.shard.shard_idx
        trail = (
            ("Jobs", links.jobs),
            (f"Run {ref.run_id}", links.run(ref.dag_id, ref.run_id)),
            (self.job.title, links.job(ref)),
        )
        return render(
            "web_live.html.j2",
            trail=trail,
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
    """In steps of ten: what is read aloud shall not change every few seconds."""
    return f"{int(share * 10) * 10} %"
