"""The application that Airflow's API server mounts."""

from __future__ import annotations

import logging
from typing import Final

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException

from batchllm_operator.web.access import NO_PAGE, current_user, links_of, login_url
from batchllm_operator.web.routes import dag_pages, pages
from batchllm_operator.web.views import message_page

_log = logging.getLogger(__name__)
_HEADINGS: Final = {
    401: "You aren't logged in",
    403: "You may not see this",
    404: "There is nothing here",
    503: "The lake can't be read",
}


def create_app() -> FastAPI:
    """The pages. Every route requires a login, those below `/dags/` also access to the DAG."""
    app = FastAPI(
        title="BatchLLM",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(current_user)],
    )
    app.include_router(pages)
    app.include_router(dag_pages)
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
            return RedirectResponse(login_url(request), status_code=302)
        _log.info("%s: %s", request.url.path, text)
    elif isinstance(error, RequestValidationError):
        status_code, text = 404, NO_PAGE
    if not is_browser:
        return PlainTextResponse(text, status_code)
    heading = _HEADINGS.get(status_code, "This page can't be shown")
    return HTMLResponse(message_page(heading, text, links_of(request)), status_code)
