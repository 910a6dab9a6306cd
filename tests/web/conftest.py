"""An Airflow database of the tests' own, and the pages mounted as Airflow's API server does it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

os.environ["AIRFLOW__API_AUTH__JWT_SECRET"] = (
    "a secret of the tests" * 4
)  # a short one is warned of

from support.airflow_records import Records
from support.fake_job import document_rows, finish, planned

ROOT_PATH = "/batchllm"


@pytest.fixture(autouse=True)
def all_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are read anywhere, but where a test is about that."""
    monkeypatch.setenv("AIRFLOW__BATCHLLM__REPORT_ROOTS", '{"*": ["/", "s3://lake"]}')


@pytest.fixture(scope="session")
def database() -> None:
    """The tables of Airflow's database."""
    from airflow import models, settings
    from airflow.models.base import Base

    if settings.engine is None:
        settings.initialize()
    models.import_all_models()
    Base.metadata.create_all(settings.engine)


@pytest.fixture
def records(database: None) -> Iterator[Records]:
    """An empty database to put runs, tasks and XComs in."""
    records = Records()
    records.clear()
    yield records
    records.clear()


@dataclass(frozen=True)
class Browser:
    """Somebody with a token, or without one."""

    client: Any
    token: str | None

    def get(self, path: str, **headers: str) -> Any:
        """What a browser gets that loads a page."""
        sent = {"accept": "text/html,*/*", **headers}
        if self.token is not None:
            sent["cookie"] = f"_token={self.token}"
        return self.client.get(ROOT_PATH + path, headers=sent, follow_redirects=False)

    def page(self, path: str) -> str:
        """A page that is shown."""
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return str(answer.text).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="session")
def pages(database: None) -> Any:
    """The application of the pages."""
    from batchllm_operator.web.routes import create_app

    return create_app()


@pytest.fixture(scope="session")
def served(pages: Any) -> Iterator[Any]:
    """The pages below an application with Airflow's own middleware and auth manager."""
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.api_fastapi.auth.middlewares.refresh_token import JWTRefreshMiddleware
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from batchllm_operator.web.access import with_security_headers

    app = FastAPI()
    init_auth_manager(app)
    app.mount(ROOT_PATH, with_security_headers(pages))
    app.add_middleware(JWTRefreshMiddleware)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(served: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same; it remembers nothing of earlier tests."""
    from batchllm_operator.web import lake_access

    for name in ("_CONNECTIONS", "_LOOKS"):
        monkeypatch.setattr(lake_access, name, lake_access.Kept(0.0))
    return served


@pytest.fixture
def log_in(client: Any) -> Callable[[str], Browser]:
    """Log a user of the SimpleAuthManager in, with the role of a viewer."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    def logged_in(name: str) -> Browser:
        user = SimpleAuthManagerUser(username=name, role="VIEWER")
        return Browser(client, get_auth_manager().generate_jwt(user))

    return logged_in


@pytest.fixture
def anna(log_in: Callable[[str], Browser]) -> Browser:
    """A user who may read all DAGs."""
    return log_in("anna")


@pytest.fixture
def nobody(client: Any) -> Browser:
    """Somebody who isn't logged in."""
    return Browser(client, None)


@pytest.fixture
def plan(tmp_path: Any) -> Any:
    """A plan of two shards, of which nothing has run."""

    return planned(tmp_path, document_rows())


@pytest.fixture
def committed(plan: Any) -> Any:
    """The same plan, after its commit."""
    finish(plan)
    return plan
