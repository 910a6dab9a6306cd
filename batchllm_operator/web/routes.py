"""The pages' routes. They take only Airflow's ids and numbers; the run's XCom names the plan.

These functions block on the database and the lake, so FastAPI calls them in threads.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Final

from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from batchllm_operator.amounts import counted
from batchllm_operator.errors import PlanError
from batchllm_operator.report.comparison import compare, render_comparison
from batchllm_operator.report.page import render_report
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.web import views
from batchllm_operator.web.access import (
    CSP,
    CurrentUser,
    PageError,
    check_readable,
    live_policy,
    may_read,
    readable_dag,
)
from batchllm_operator.web.job_state import job_state
from batchllm_operator.web.jobs import list_jobs
from batchllm_operator.web.lake_access import LakeReader
from batchllm_operator.web.links import Links
from batchllm_operator.web.plan_uri import report_roots
from batchllm_operator.web.runs import (
    ENDED,
    JobInRun,
    JobRef,
    job_of_task,
    jobs_of_run,
    run_state,
)

MapIndex = Annotated[int, Path(ge=-1, lt=1 << 31)]
ShardIdx = Annotated[int, Path(ge=0, lt=1 << 31)]


def find_job(dag_id: str, run_id: str, task_id: str, map_index: MapIndex) -> JobInRun:
    """The job that a task has planned. Raises `PageError` if the run has no such task."""
    with create_session(scoped=False) as session:
        jobs = jobs_of_run(session, dag_id, run_id)
    for job in jobs:
        if (job.ref.task_id, job.ref.map_index) == (task_id, map_index):
            return job
    raise PageError(404, "No such job in this run: its plan task isn't there (any more).")


PathJob = Annotated[JobInRun, Depends(find_job)]

_RELOAD: Final = 205
"""Makes a live page's script reload the page, which has become another one."""

pages = APIRouter()
dag_pages = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[Depends(readable_dag)])


@pages.get("/")
def show_jobs(request: Request, user: CurrentUser) -> Response:
    """All jobs of DAGs that the user may read. Doesn't read the lake."""
    with create_session(scoped=False) as session:
        jobs = list_jobs(session, lambda dag_id: may_read(user, dag_id))
    return HTMLResponse(views.jobs_page(jobs, _links(request)))


@pages.get("/compare")
def show_comparison(request: Request, user: CurrentUser, before: str, after: str) -> Response:
    """Compare two committed jobs, of any DAGs that the user may read.

    Each is given as `<dag_id>/<run_id>/<task_id>/<map_index>` of its plan task.
    """
    reports = []
    for text in (before, after):
        ref = JobRef.of(text)
        if ref is None:
            raise PageError(404, "There is no such page.")
        check_readable(user, ref.dag_id, ref.run_id, ref.task_id)
        reader = _reader(find_job(ref.dag_id, ref.run_id, ref.task_id, ref.map_index))
        report = None if reader is None else reader.report()
        if report is None:
            raise PageError(404, f"Run {ref.run_id} has no report: it hasn't been committed.")
        reports.append(report)
    trail = _links(request).trail()
    return HTMLResponse(render_comparison(compare(*reports), trail=trail))


@dag_pages.get("")
def show_run(request: Request, dag_id: str, run_id: str) -> Response:
    """A run's only job, or a choice among its jobs."""
    links = _links(request)
    with create_session(scoped=False) as session:
        state = run_state(session, dag_id, run_id)
        jobs = jobs_of_run(session, dag_id, run_id)
    if state is None:
        raise PageError(404, "There is no such run of this DAG (any more).")
    if not jobs:
        raise PageError(
            404,
            "No job runs here: this run of the DAG has no task of BatchLLMPlanOperator, or Airflow"
            " hasn't made its tasks yet.",
        )
    if len(jobs) > 1:
        return HTMLResponse(views.choice_page(jobs, dag_id, run_id, links))
    return _job_page(jobs[0], links)


@dag_pages.get("/jobs/{task_id}/{map_index}")
def show_job(request: Request, job: PathJob) -> Response:
    """A job: live progress until the commit, then its report."""
    return _job_page(job, _links(request))


@dag_pages.get("/jobs/{task_id}/{map_index}/live")
def show_job_news(request: Request, job: PathJob) -> Response:
    """The part of a job's page that changes; 205 once there is a report."""
    found = _live_job(job)
    if isinstance(found, RunReport):
        return Response(status_code=_RELOAD)
    return HTMLResponse(found.fragment(_links(request)))


@dag_pages.get("/jobs/{task_id}/{map_index}/report.html")
def download_report(job: PathJob) -> Response:
    """The report as a file, rendered from report.json."""
    reader = _reader(job)
    report = None if reader is None else reader.report()
    if report is None:
        raise PageError(404, "There is no report yet: the job hasn't been committed.")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{report.job}-{report.ds}")
    headers = {"content-disposition": f'attachment; filename="{name}.html"'}
    return HTMLResponse(render_report(report), headers=headers)


@dag_pages.get("/jobs/{task_id}/{map_index}/shards/{shard_idx}")
def show_shard(request: Request, job: PathJob, shard_idx: ShardIdx) -> Response:
    """A shard's live progress; after the commit, the job's report."""
    links = _links(request)
    found = _live_shard(job, shard_idx)
    if found is None:
        return _redirect(links.job(job.ref))
    return _live_page(found, links)


@dag_pages.get("/jobs/{task_id}/{map_index}/shards/{shard_idx}/live")
def show_shard_news(job: PathJob, shard_idx: ShardIdx) -> Response:
    """The part of a shard's page that changes; 205 once there is a report."""
    found = _live_shard(job, shard_idx)
    if found is None:
        return Response(status_code=_RELOAD)
    return HTMLResponse(found.fragment())


@dag_pages.get("/tasks/{task_id}/{map_index}")
def show_task(
    request: Request, dag_id: str, run_id: str, task_id: str, map_index: MapIndex
) -> Response:
    """Redirect to the page of a generate task's job."""
    with create_session(scoped=False) as session:
        job = job_of_task(session, dag_id, run_id, task_id, map_index)
    if job is None:
        raise PageError(
            404,
            "What this task generates isn't known: it isn't a task of"
            " BatchLLMGenerateOperator, or nothing is planned yet.",
        )
    return _redirect(_links(request).job(job.ref))


def _links(request: Request) -> Links:
    return Links(request.scope.get("root_path", ""))


def _redirect(url: str) -> Response:
    return RedirectResponse(url, status_code=302)


def _reader(job: JobInRun) -> LakeReader | None:
    """The reader of the job's plan; None before there is a plan.

    Raises:
        PageError: the plan task's XCom isn't a plan's URI, or there are no roots for this DAG.
    """
    try:
        uri = job.plan_uri()
        if uri is None:
            return None
        with create_session(scoped=False) as session:
            roots = report_roots(session, job.ref)
    except PlanError as error:
        raise PageError(409, f"This run's plan can't be shown: {error}.") from error
    return LakeReader(uri, roots)


def _live_job(job: JobInRun) -> RunReport | views.LiveJob:
    """The job's report if there is one, else its progress."""
    reader = _reader(job)
    status = None
    if reader is not None:
        status = None if (report := reader.report()) is not None else reader.status()
        if status is None:  # committed, perhaps only just now
            report = report or reader.report()
            if report is None:
                raise PageError(503, "The job was committed just now; look again in a moment.")
            return report
    with create_session(scoped=False) as session:
        stage = job_state(session, job)
        state = run_state(session, job.ref.dag_id, job.ref.run_id)
    return views.LiveJob(job, stage, status, is_final=state in ENDED)


def _live_shard(job: JobInRun, shard_idx: int) -> views.LiveShard | None:
    """A shard's progress; None once there is a report."""
    found = _live_job(job)
    if isinstance(found, RunReport):
        return None
    if found.status is None:
        raise PageError(404, "Nothing is planned yet, so there are no shards.")
    if shard_idx >= len(found.status.shards):
        shards = counted(len(found.status.shards), "shard")
        raise PageError(404, f"The plan has {shards}, and no such one.")
    return views.LiveShard(job, found.status.shards[shard_idx], found.is_final)


def _job_page(job: JobInRun, links: Links) -> Response:
    found = _live_job(job)
    if isinstance(found, RunReport):
        return HTMLResponse(views.report_page(found, job.ref, links))
    return _live_page(found, links)


def _live_page(found: views.LiveJob | views.LiveShard, links: Links) -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {} if found.is_final else {CSP: live_policy(nonce)}
    return HTMLResponse(found.page(links, nonce), headers=headers)
