"""Nobody sees anything whom Airflow's auth manager doesn't let."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest
from support.airflow_records import Records

Browser = Any  # the class in conftest.py

VALUES = {
    "dag_id": "job",
    "run_id": "a",
    "task_id": "batchllm.plan",
    "map_index": "-1",
    "shard_idx": "0",
}


def paths(app: Any) -> list[str]:
    """An address of each route that the application has, whoever has added it."""
    found = [re.sub(r"\{(\w+)\}", lambda match: VALUES[match[1]], r.path) for r in app.routes]
    assert len(found) >= 8
    return found


def test_each_route_refuses_without_a_login(nobody: Browser, pages: Any, records: Records) -> None:
    records.run().job("x")
    for path in paths(pages):
        page = nobody.get(path)
        assert page.status_code == 302, path
        assert "/api/v2/auth/login?next=" in page.headers["location"]
        assert nobody.get(path, accept="*/*").status_code == 401, path
        forged = nobody.get(path, authorization="Bearer forged", accept="*/*")
        assert forged.status_code == 403, path


@pytest.fixture
def more_pages(pages: Any) -> Iterator[Any]:
    """The application, whose new routes go after the test."""
    before = [*pages.router.routes]
    yield pages
    pages.router.routes[:] = before


def test_a_route_that_is_added_to_the_application_has_the_dependency(
    nobody: Browser, more_pages: Any
) -> None:
    def show_new() -> str:
        return "all of it"

    more_pages.get("/new")(show_new)

    assert nobody.get("/new", accept="*/*").status_code == 401


def test_login_leads_back_to_the_page(nobody: Browser) -> None:
    answer = nobody.get("/dags/job/runs/a%2B1?x=1")
    path, _, query = answer.headers["location"].partition("?")
    assert path == "/api/v2/auth/login"
    assert parse_qs(query) == {"next": ["/batchllm/dags/job/runs/a%2B1?x=1"]}


@pytest.fixture
def bob(log_in: Callable[[str], Browser], monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A user who may read all DAGs but `secret`, and of a DAG named like an entity all but that."""
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    def is_authorized_dag(
        self: Any, *, method: str, user: Any, access_entity: Any = None, details: Any = None
    ) -> bool:
        assert method == "GET"
        if user.username != "bob":
            return True
        return details.id not in ("secret", access_entity and access_entity.name)

    monkeypatch.setattr(SimpleAuthManager, "is_authorized_dag", is_authorized_dag)
    return log_in("bob")


@pytest.mark.parametrize("dag_id", ["secret", "RUN", "TASK_INSTANCE", "XCOM"])
def test_who_may_not_read_a_dag_sees_nothing_of_it(
    bob: Browser, anna: Browser, pages: Any, records: Records, committed: Any, dag_id: str
) -> None:
    uri = committed.folder.uri
    records.run(dag_id).job(uri, dag_id=dag_id, outcome={"num_rows_in": 30})
    records.run("job").job(uri)
    assert dag_id in anna.page("/")
    listed = bob.page("/")
    assert f"DAG {dag_id}," not in listed and "DAG job," in listed
    about_dags = [path for path in paths(pages) if path.startswith("/dags/")]
    assert len(about_dags) == len(paths(pages)) - len(("/", "/compare"))
    for path in about_dags:
        of_dag = path.replace("/dags/job/", f"/dags/{dag_id}/")
        assert bob.get(of_dag).status_code == 403, path
        assert anna.get(of_dag).status_code in (200, 205, 302, 404), path


@pytest.mark.parametrize("dag_id", ["secret", "XCOM"])
def test_a_comparison_asks_about_both_dags(
    bob: Browser, anna: Browser, records: Records, committed: Any, dag_id: str
) -> None:
    for each in (dag_id, "job"):
        records.run(each).job(committed.folder.uri, dag_id=each)
    ours, theirs = (f"{each}/a/batchllm.plan/-1" for each in ("job", dag_id))
    for before, after in ((ours, theirs), (theirs, ours)):
        path = f"/compare?before={before}&after={after}"
        assert bob.get(path).status_code == 403
        assert anna.get(path).status_code == 200
    assert bob.get(f"/compare?before={ours}&after={ours}").status_code == 200
