"""Registers the pages with Airflow; cheap, because each of Airflow's processes imports it."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any

from airflow.plugins_manager import AirflowPlugin

from batchllm_operator.web.links import PREFIX, LiveProgressLink, pages_root

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


async def lazy_app(scope: Scope, receive: Receive, send: Send) -> None:
    """The pages as an ASGI application that is built at the first request.

    Scheduler, triggerer and tasks load plugins, too, and must not pay for pyarrow and jinja2.
    """
    app = await asyncio.to_thread(_pages)
    await app(scope, receive, send)


@cache
def _pages() -> ASGIApp:
    from batchllm_operator.web.access import with_security_headers
    from batchllm_operator.web.routes import create_app

    return with_security_headers(create_app())


class BatchLLMPlugin(AirflowPlugin):
    """Adds the pages to the navigation and to each run of a DAG, and links to each task."""

    name = "batchllm"
    # Airflow declares these as instance variables, but also reads them from the class.
    fastapi_apps: list[Any] = [  # noqa: RUF012
        {"app": lazy_app, "url_prefix": PREFIX, "name": "BatchLLM"}
    ]
    external_views: list[Any] = [  # noqa: RUF012
        {
            "name": "BatchLLM",
            "href": f"{pages_root()}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "batchllm",
        },
        {
            "name": "BatchLLM",
            "href": f"{pages_root()}/dags/{{DAG_ID}}/runs/{{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "batchllm-run",
        },
    ]
    operator_extra_links: list[Any] = [LiveProgressLink()]  # noqa: RUF012
