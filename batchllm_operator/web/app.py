"""The application that Airflow's API server mounts."""

from __future__ import annotations

import logging

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from batchllm_operator.web.access import PageError, current_user, login_url
from batchllm_operator.web.links import Links
from batchllm_operator.web.routes import dag_pages, pages
from batchllm_operator.web.views import message_page

_log = logging.getLogger(__name__)


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
    app.add_exception_handler(PageError, _problem)
    app.add_exception_handler(StarletteHTTPException, _refusal)
    app.add_exception_handler(RequestValidationError, _no_page)
    app.add_exception_handler(Exception, _fault)
    return app


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, PageError)
    _log.info("%s: %s", request.url.path, error)
    return _message(request, error.status_code, str(error))


def _refusal(request: Request, error: Exception) -> Response:
    """Redirect a browser without a login to the login page."""
    assert isinstance(error, StarletteHTTPException)
    if error.status_code == 401 and _wants_page(request):
        return RedirectResponse(login_url(request), status_code=302)
    return _message(request, error.status_code, str(error.detail))


def _no_page(request: Request, _: Exception) -> Response:
    return _message(request, 404, "There is no such page.")


def _fault(request: Request, _: Exception) -> Response:
    """Show no details, which may be secret; the log has them."""
    return _message(request, 500, "The page failed; the log of Airflow's API server says how.")


def _message(request: Request, status_code: int, text: str) -> Response:
    if not _wants_page(request):
        return PlainTextResponse(text, status_code)
    heading = _HEADINGS.get(status_code, "This page can't be shown")
    links = Links(request.scope.get("root_path", ""))
    return HTMLResponse(message_page(heading, text, links), status_code)


def _wants_page(request: Request) -> bool:
    """Whether a browser loads a page, rather than a script or a program."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


_HEADINGS = {
    401: "You aren't logged in",
    403: "You may not see this",
    404: "There is nothing here",
    503: "The lake can't be read",
}
