"""How the pages reach the lake: with whose credentials, how often, and what of it is said."""

import json
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.airflow_records import Records

from batchllm_operator.storage import Folder
from batchllm_operator.web.lake_access import Kept
from batchllm_operator.web.plan_uri import PlanURI

Browser = Any  # the class in conftest.py
S3_URI = "s3://lake/out/_batchllm/job/2026-01-31/plan-0123456789abcdef"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each folder that is opened; none can be read."""
    options: list[dict[str, Any]] = []

    class BrokenFolder:
        def __init__(self, uri: str) -> None:
            self.uri = uri

        def open_file(self, name: str) -> Any:
            raise OSError("refused for key=hunter22secret at https://me:pass@host/x")

    def open_folder(uri: str, **given: Any) -> Any:
        options.append(given)
        return BrokenFolder(uri)

    monkeypatch.setattr(Folder, "open", open_folder)
    return options


def set_connection(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Name a connection in the API server's environment, and let Airflow have it."""
    from airflow.models.connection import Connection

    found = {"conn_type": "aws", "login": None, "password": None, "extra": None, **fields}
    monkeypatch.setenv("BATCHLLM_AWS_CONN_ID", "lake")
    monkeypatch.setattr(
        Connection, "get_connection_from_secrets", lambda conn_id: SimpleNamespace(**found)
    )


def test_without_a_connection_the_environment_decides(
    anna: Browser, records: Records, opened: list[dict[str, Any]]
) -> None:
    records.run().job(S3_URI)
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 503
    assert "The lake can&#39;t be read" in answer.text and "pass@" not in answer.text
    assert opened == [{}]


def test_a_connections_secrets_reach_the_lake_and_no_page(
    anna: Browser,
    records: Records,
    opened: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extra = json.dumps({"region_name": "eu-1", "endpoint_url": "http://s3.local"})
    set_connection(monkeypatch, login="AKIAKEY", password="hunter22secret", extra=extra)
    records.run().job(S3_URI)
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 503
    assert "hunter22" not in answer.text and "***" in answer.text
    assert opened == [
        {
            "key": "AKIAKEY",
            "secret": "hunter22secret",
            "endpoint_url": "http://s3.local",
            "client_kwargs": {"region_name": "eu-1"},
        }
    ]


def test_looks_share_a_connection_for_a_while(
    anna: Browser,
    records: Records,
    opened: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batchllm_operator.web import lake_access

    set_connection(monkeypatch, login="AKIAKEY", password="hunter22secret")
    monkeypatch.setattr(lake_access, "_CONNECTIONS", Kept(60.0))
    records.run().job(S3_URI)
    anna.get("/dags/job/runs/a")
    set_connection(monkeypatch, conn_type="ftp")
    anna.get("/dags/job/runs/a")
    assert [options["key"] for options in opened] == ["AKIAKEY"] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conn_type": "ftp"}, "is of type"),
        ({"login": "AKIAKEY"}, "no use without each other"),
        ({"extra": "hunter22 {"}, "isn&#39;t a JSON object"),
        (None, "nowhere"),
    ],
)
def test_a_connection_that_will_not_do_is_said(
    anna: Browser,
    records: Records,
    opened: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any] | None,
    said: str,
) -> None:
    monkeypatch.setenv("BATCHLLM_AWS_CONN_ID", "nowhere")
    if fields is not None:
        set_connection(monkeypatch, **fields)
    records.run().job(S3_URI)
    answer = anna.get("/dags/job/runs/a")
    assert answer.status_code == 409
    assert said in answer.text and "hunter22" not in answer.text
    assert opened == []


def test_viewers_at_one_time_cost_one_reading() -> None:
    now = [0.0]
    kept: Kept[int] = Kept(2.0, clock=lambda: now[0])
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        assert go_on.wait(30)
        made.append(1)
        return len(made)

    found: list[int] = []
    viewers = [
        threading.Thread(target=lambda: found.append(kept.get("plan", make))) for _ in range(10)
    ]
    for viewer in viewers:
        viewer.start()
    assert begun.wait(30)
    go_on.set()
    for viewer in viewers:
        viewer.join()
    assert found == [1] * 10
    now[0] = 1.9
    assert kept.get("plan", make) == 1
    now[0] = 2.0
    assert kept.get("plan", make) == 2
    assert kept.get("other", make) == 3


def test_nobody_waits_long_for_another_reader() -> None:
    kept: Kept[int] = Kept(60.0, wait_s=0.01)
    begun, go_on = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        assert go_on.wait(30)
        return 1

    reader = threading.Thread(target=kept.get, args=("plan", make))
    reader.start()
    assert begun.wait(30)
    with pytest.raises(TimeoutError):
        kept.get("plan", make)
    assert kept.get("other", lambda: 2) == 2
    go_on.set()
    reader.join()
    assert kept.get("plan", lambda: 3) == 1


def test_a_storage_that_does_not_answer_holds_few_threads(
    anna: Browser, records: Records, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchllm_operator.web import lake_access

    monkeypatch.setattr(lake_access, "_READERS", threading.BoundedSemaphore(1))
    monkeypatch.setattr(lake_access, "_READER_WAIT_S", 0.01)
    records.run().job(plan.folder.uri)
    judge, judged = PlanURI.place, []

    def note(uri: PlanURI, roots: Iterable[str]) -> str:
        judged.append(uri)  # this asks the storage, too
        return judge(uri, roots)

    monkeypatch.setattr(PlanURI, "place", note)
    monkeypatch.setattr(lake_access, "_LOOKS", Kept(60.0))
    with lake_access._READERS:
        answer = anna.get("/dags/job/runs/a")
        assert answer.status_code == 503 and "takes long" in answer.text
    assert not judged
    for _ in range(3):
        assert anna.get("/dags/job/runs/a").status_code == 200
    assert len(judged) == 1
    monkeypatch.setenv("AIRFLOW__BATCHLLM__REPORT_ROOTS", '{"*": ["/absent"]}')
    assert anna.get("/dags/job/runs/a").status_code == 409  # what is kept isn't for all DAGs


def test_few_are_kept_and_no_failures() -> None:
    kept: Kept[int] = Kept(60.0)

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept.get(1, fail)
    for key in range(1000):
        assert kept.get(key, lambda key=key: key) == key  # type: ignore[misc]
    assert len(kept._entries) <= 64
