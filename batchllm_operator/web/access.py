"""Who may see the pages, by Airflow's auth manager, at each request; what a browser may do there.

Airflow doesn't protect a plugin's application, and a mounted application has no
`app.state.auth_manager`. So the whole application depends on `current_user`, and each route about
a DAG on `readable_dag`.
"""

import os
from collections.abc import Iterable
from typing import Annotated, Final
from urllib.parse import quote, urlencode

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchllm_operator.secrets import Masker
from batchllm_operator.web.links import Links

current_user = get_user
"""Answers 401 unless the request has a valid token of Airflow's, in a cookie or a header."""

CurrentUser = Annotated[BaseUser, Depends(current_user)]

_IDS: Final = ("run_id", "task_id")
_MAX_ID_CHARS: Final = 250

# The pages show a run, its tasks' states, their XComs, and what those refer to.
_ENTITIES: Final = (None, DagAccessEntity.RUN, DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM)
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'self'"
)
CSP: Final = "content-security-policy"
NO_PAGE: Final = "There is no such page."
_ALWAYS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class PageError(HTTPException):
    """A page can't be shown; its message can, as secrets are masked in it."""

    def __init__(self, status_code: int, text: str, *, secrets: Iterable[str] = ()) -> None:
        super().__init__(status_code, Masker.of(os.environ, secrets=secrets)(text))


def may_read(user: BaseUser, dag_id: str) -> bool:
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    manager = get_auth_manager()
    return all(
        manager.is_authorized_dag(method="GET", access_entity=entity, details=details, user=user)
        for entity in _ENTITIES
    )


def readable_dag(request: Request, user: CurrentUser) -> None:
    """Refuse a request whose user may not read the DAG in its path; see `check_readable`."""
    ids = [request.path_params[name] for name in _IDS if name in request.path_params]
    check_readable(user, request.path_params["dag_id"], *ids)


def check_readable(user: BaseUser, dag_id: str, *ids: str) -> None:
    """Check that the user may read the DAG; `ids` are the request's other ids.

    Raises `PageError`: 404 if an id is invalid; 403 without permission.
    """
    if not all(map(_can_be_id, (dag_id, *ids))):
        raise PageError(404, NO_PAGE)
    if not may_read(user, dag_id):
        raise PageError(403, "You may not read this DAG, its runs, tasks or XComs.")


def links_of(request: Request) -> Links:
    return Links(request.scope.get("root_path", ""))


def login_url(request: Request) -> str:
    """Airflow's login page, which returns to the request's page."""
    airflow_root = links_of(request).root.rpartition("/")[0]
    next_url = quote(request.scope["path"])
    if request.url.query:
        next_url += f"?{request.url.query}"
    return f"{airflow_root}/api/v2/auth/login?{urlencode({'next': next_url})}"


def _can_be_id(text: str) -> bool:
    """Whether a text may be one of Airflow's ids; databases fail on some other texts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(text) <= _MAX_ID_CHARS and text.isprintable()


def live_policy(nonce: str) -> str:
    """The content security policy of a live page, whose only script polls this server."""
    return f"{_POLICY}; script-src 'nonce-{nonce}'; connect-src 'self'"


def with_security_headers(app: ASGIApp) -> ASGIApp:
    """The ASGI application, with our headers in each response; its own policy stays."""

    async def secured(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_ALWAYS)
                headers.setdefault(CSP, _POLICY)
            await send(message)

        await app(scope, receive, send_with_headers)

    return secured
