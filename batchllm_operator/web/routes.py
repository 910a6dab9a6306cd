"""The application that Airflow's API server mounts.

Its routes take only Airflow's ids and numbers; the run's XCom names the plan.
These functions block on the database and the lake, so FastAPI calls them in threads.
"""

import logging
import re
import secrets
from typing import Annotated, Final

from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException

from batchllm_operator.amounts import counted
from batchllm_operator.errors import PlanError
from batchllm_operator.report.comparison import compare, render_comparison
from batchllm_operator.report.page import render_report
from batchllm_operator.report.pages import render
from batchllm_operator.shards.status import JobStatus
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.web import access, views
from batchllm_operator.web.access import NO_PAGE, CurrentUser, PageError
from batchllm_operator.web.jobs import job_state, list_jobs
from batchllm_operator.web.lake_access import look
from batchllm_operator.web.links import Links
from batchllm_operator.web.plan_uri import PlanURI
from batchllm_operator.web.runs import JobRef, JobRun, job_of_task, jobs_of_run, report_roots

_log = logging.getLogger(__name__)
_RELOAD: Final = 205
"""Makes a live page's script reload the page, which has become another one."""
_HEADINGS: Final = {
    401: "You aren't logged in",
    403: "You may not see this",
    404: "There is nothing here",
    503: "The lake can't be read",
}

MapIndex = Annotated[int, Path(ge=-1, lt=1 << 31)]
ShardIdx = Annotated[int, Path(ge=0, lt=1 << 31)]
PageLinks = Annotated[Links, Depends(access.links_of)]


def find_job(dag_id: str, run_id: str, task_id: str, map_index: MapIndex) -> JobRun:
    """The job that a task has planned. Raises `PageError` if the run has no such task."""
    ref = JobRef(dag_id, run_id, task_id, map_index)
    with create_session(scoped=False) as session:
        jobs = jobs_of_run(session, dag_id, run_id)
    by_ref = {job.ref.first: job for job in jobs} | {job.ref: job for job in jobs}
    if (found := by_ref.get(ref) or by_ref.get(ref.first)) is not None:
        return found
    raise PageError(404, "No such job in this run: its plan task isn't there (any more).")


PathJob = Annotated[JobRun, Depends(find_job)]

_pages = APIRouter()
_dag_pages = APIRouter(
    prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[Depends(access.readable_dag)]
)


@_pages.get("/")
def show_jobs(user: CurrentUser, links: PageLinks) -> Response:
    """All jobs of DAGs that the user may read. Doesn't read the lake."""
    with create_session(scoped=False) as session:
        jobs = list_jobs(session, lambda dag_id: access.may_read(user, dag_id))
    return HTMLResponse(render("web_jobs.html.j2", jobs=jobs, links=links, trends=views.trends))


@_pages.get("/compare")
def show_comparison(user: CurrentUser, links: PageLinks, before: str, after: str) -> Response:
    """Compare two committed jobs, of any DAGs that the user may read.

    Each is given as `<dag_id>/<run_id>/<task_id>/<map_index>` of its plan task.
    """
    reports = []
    for text in (before, after):
        ref = JobRef.of(text)
        if ref is None:
            raise PageError(404, NO_PAGE)
        access.check_readable(user, ref.dag_id, ref.run_id, ref.task_id)
        report = _look(find_job(ref.dag_id, ref.run_id, ref.task_id, ref.map_index))
        if not isinstance(report, RunReport):
            raise PageError(404, f"Run {ref.run_id} has no report: it hasn't been committed.")
        reports.append(report)
    return HTMLResponse(render_comparison(compare(*reports), trail=links.trail()))


@_dag_pages.get("")
def show_run(links: PageLinks, dag_id: str, run_id: str) -> Response:
    """A run's only job, or a choice among its jobs."""
    with create_session(scoped=False) as session:
        jobs = jobs_of_run(session, dag_id, run_id)
    if not jobs:
        raise PageError(
            404,
            "No job runs here: the DAG has no such run (any more), or the run has no task of"
            " BatchLLMPlanOperator, or Airflow hasn't made its tasks yet.",
        )
    if len(jobs) > 1:
        template, trail = "web_choice.html.j2", links.trail()
        return HTMLResponse(
            render(template, trail=trail, jobs=jobs, links=links, dag_id=dag_id, run_id=run_id)
        )
    return show_job(links, jobs[0])


@_dag_pages.get("/jobs/{task_id}/{map_index}")
def show_job(links: PageLinks, job: PathJob) -> Response:
    """A job: live progress until the commit, then its report."""
    shown = _view(job, links)
    if isinstance(shown, RunReport):
        actions = (("Download this report", f"{links.job(job.ref)}/report.html"),)
        return HTMLResponse(render_report(shown, trail=links.trail(job.ref), actions=actions))
    return _live_page(shown)


@_dag_pages.get("/jobs/{task_id}/{map_index}/live")
def show_job_news(links: PageLinks, job: PathJob) -> Response:
    """The part of a job's page that changes; 205 once there is a report."""
    return _news(_view(job, links))


@_dag_pages.get("/jobs/{task_id}/{map_index}/report.html")
def download_report(job: PathJob) -> Response:
    """The report as a file, rendered from report.json."""
    report = _look(job)
    if not isinstance(report, RunReport):
        raise PageError(404, "There is no report yet: the job hasn't been committed.")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{report.job}-{report.ds}")
    headers = {"content-disposition": f'attachment; filename="{name}.html"'}
    return HTMLResponse(render_report(report), headers=headers)


@_dag_pages.get("/jobs/{task_id}/{map_index}/shards/{shard_idx}")
def show_shard(links: PageLinks, job: PathJob, shard_idx: ShardIdx) -> Response:
    """A shard's live progress; after the commit, the job's report."""
    shown = _view(job, links, shard_idx)
    if isinstance(shown, RunReport):
        return RedirectResponse(links.job(job.ref), status_code=302)
    return _live_page(shown)


@_dag_pages.get("/jobs/{task_id}/{map_index}/shards/{shard_idx}/live")
def show_shard_news(links: PageLinks, job: PathJob, shard_idx: ShardIdx) -> Response:
    """The part of a shard's page that changes; 205 once there is a report."""
    return _news(_view(job, links, shard_idx))


@_dag_pages.get("/tasks/{task_id}/{map_index}")
def show_task(
    links: PageLinks, dag_id: str, run_id: str, task_id: str, map_index: MapIndex
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
    return RedirectResponse(links.job(job.ref), status_code=302)


def _look(job: JobRun) -> RunReport | JobStatus | None:
    """The job's report, before the commit its status, before there is a plan None.

    Raises `PageError`: see `lake_access.look`; 409 if the plan task's XCom isn't a plan's URI, or
    there are no roots for this DAG.
    """
    if job.noted is None:
        return None
    try:
        uri = PlanURI.parse(job.noted)
        with create_session(scoped=False) as session:
            roots = report_roots(session, job.ref)
    except PlanError as error:
        raise PageError(409, f"This run's plan can't be shown: {error}.") from error
    return look(uri, roots)


def _view(job: JobRun, links: Links, shard_idx: int | None = None) -> RunReport | views.LivePage:
    """The job's report, or before the commit a live page of it, or of one of its shards."""
    seen = _look(job)
    if isinstance(seen, RunReport):
        return seen
    if shard_idx is None:
        with create_session(scoped=False) as session:
            stage = job_state(session, job)
        return views.live_job(job, stage, seen, links)
    if seen is None:
        raise PageError(404, "Nothing is planned yet, so there are no shards.")
    if shard_idx >= len(seen.shards):
        raise PageError(404, f"The plan has {counted(len(seen.shards), 'shard')}, and no such one.")
    return views.live_shard(job, seen.shards[shard_idx], links)


def _live_page(shown: views.LivePage) -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {} if shown.job.has_ended else {access.CSP: access.live_policy(nonce)}
    return HTMLResponse(shown.page(nonce), headers=headers)


def _news(shown: RunReport | views.LivePage) -> Response:
    if isinstance(shown, RunReport):
        return Response(status_code=_RELOAD)
    return HTMLResponse(shown.fragment())


def create_app() -> FastAPI:
    """The pages. Every route requires a login, those below `/dags/` also access to the DAG."""
    app = FastAPI(
        title="BatchLLM",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(access.current_user)],
    )
    app.include_router(_pages)
    app.include_router(_dag_pages)
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refusal)
    return app


def _refusal(request: Request, error: Exception) -> Response:
    """The answer in place of a page; a browser without a login goes to the login page.

    It shows nothing of an unexpected error, which may hold secrets; the log has it.
    """
    is_browser = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    status_code, text = 500, "The page failed; the log of Airflow's API server says how."
    if isinstance(error, HTTPException):
        status_code, text = error.status_code, str(error.detail)
        if status_code == 401 and is_browser:
            return RedirectResponse(access.login_url(request), status_code=302)
        _log.info("%s: %s", request.url.path, text)
    elif isinstance(error, RequestValidationError):
        status_code, text = 404, NO_PAGE
    if not is_browser:
        return PlainTextResponse(text, status_code)
    heading = _HEADINGS.get(status_code, "This page can't be shown")
    trail = access.links_of(request).trail()
    page = render("web_message.html.j2", trail=trail, heading=heading, text=text)
    return HTMLResponse(page, status_code)
