"""Iceberg tables of a REST catalog: answers to commits, tokens, and lent credentials that end."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyiceberg.catalog
import pytest
from lake.test_tables import numbers, values
from moto.moto_server.werkzeug_app import create_backend_app
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest
from pyiceberg.utils.config import Config
from support.fake_job import document_rows, fake_spec, finish
from support.lake_tables import DS, IcebergLake, of_plan, open_lake, publish, wrapped
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

import batchllm_operator.lake.iceberg.credentials as credentials
from batchllm_operator.errors import StorageError
from batchllm_operator.lake.iceberg.replacement import IcebergStaging
from batchllm_operator.plan.plan_job import plan_job

STATUS: Final[dict[type[Exception], int]] = {
    **dict.fromkeys((NoSuchNamespaceError, NoSuchTableError), 404),
    **dict.fromkeys((CommitFailedException, TableAlreadyExistsError), 409),
}
HOUR_S: Final = 3600


def serve(app: Any) -> tuple[str, Callable[[], None]]:
    """The URL of a WSGI application on a loopback port, and what stops it."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return f"http://127.0.0.1:{server.server_port}", stop


class RestLake(IcebergLake):
    """A table that jobs reach over HTTP, by the routes that pyiceberg calls.

    Behind it is pyiceberg's SQL catalog, which other programs write through.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tokens = ["token"]
        """The last one is valid."""
        self.faults: list[tuple[int, bool]] = []
        """Of the next commits: the status that is answered, and whether the commit happens."""
        self.lends: dict[str, str] = {}
        """Where files are, if credentials for them are lent."""
        self.num_lent = 0
        self._lock = threading.Lock()
        url, self.stop = serve(Request.application(self._respond))
        oauth = f"{url}/v1/oauth/tokens"
        self.configure(args[2], TYPE="rest", URI=url, OAUTH2_SERVER_URI=oauth, TOKEN="token")
        self.commit, self.read = (RestCatalog, "commit_table"), (RestCatalog, "load_table")

    def configure(self, monkeypatch: pytest.MonkeyPatch, *removed: str, **settings: str) -> None:
        """Change settings of jobs for the catalog."""
        for name in removed:
            monkeypatch.delenv(f"PYICEBERG_CATALOG__TESTS__{name}")
        for name, value in settings.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{name}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())

    def _respond(self, request: Request) -> Response:
        with self._lock:
            try:
                status, answer = self._answer(request)
            except tuple(STATUS) as error:
                status, answer = STATUS[type(error)], str(error)
        if isinstance(answer, str):
            answer = {"error": {"message": answer, "type": "Fault", "code": status}}
        return Response(json.dumps(answer), status)

    def _answer(self, request: Request) -> tuple[int, Any]:
        path = request.path.strip("/").split("/")[1:]
        if path == ["oauth", "tokens"]:
            self.tokens.append(f"token-{len(self.tokens)}")
            return 200, {"access_token": self.tokens[-1], "token_type": "bearer"}
        if request.headers["Authorization"] != f"Bearer {self.tokens[-1]}":
            return 401, "the token has ended"
        match (request.method, *path):
            case ("GET", "config"):
                return 200, {"defaults": {}, "overrides": {}}
            case ("GET", "namespaces", name):
                self.catalog.load_namespace_properties(name)
                return 200, {"namespace": [name]}
            case ("POST", "namespaces", name, "tables"):
                asked = json.loads(request.data)
                schema, spec = Schema(**asked["schema"]), PartitionSpec(**asked["partition-spec"])
                place = (name, asked["name"])
                return 200, self._described(self.catalog.create_table(place, schema, None, spec))
            case ("GET", "namespaces", name, "tables", last):
                return 200, self._described(self.catalog.load_table((name, last)))
            case ("POST", "namespaces", name, "tables", last):
                status, happens = self.faults.pop(0) if self.faults else (200, True)
                commit = CommitTableRequest.model_validate_json(request.data)
                if happens:
                    table = self.catalog.load_table((name, last))
                    self.catalog.commit_table(table, commit.requirements, commit.updates)
                described = self._described(self.catalog.load_table((name, last)))
                return status, described if status == 200 else "a fault"
        return 404, f"no route {request.method} {path}"

    def _described(self, table: Any) -> dict[str, Any]:
        metadata, config = json.loads(table.metadata.model_dump_json()), dict(self.lends)
        if self.lends:
            self.num_lent += 1
            end_ms = str(int((time.time() + HOUR_S) * 1000))
            config |= {"s3.session-token": "session", "s3.session-token-expires-at-ms": end_ms}
            config |= {"s3.access-key-id": f"key-{self.num_lent}", "s3.secret-access-key": "?"}
        return {
            "metadata-location": table.metadata_location,
            "metadata": metadata,
            "config": config,
        }


def with_keys(app: Any, are_over: set[str]) -> Any:
    """An S3 server that takes only access keys of its own, until their session is over."""

    def checked(environ: dict[str, Any], start_response: Any) -> Any:
        signed = environ.get("HTTP_AUTHORIZATION", "")
        key = signed.partition("Credential=")[2].partition("/")[0]
        if key.startswith("key-") and key not in are_over:
            return app(environ, start_response)
        expired = Response("<Error><Code>ExpiredToken</Code></Error>", 400)
        return expired(environ, start_response)

    return checked


@pytest.fixture
def lake(lake_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RestLake]:
    lake = RestLake(lake_uri, tmp_path, monkeypatch)
    yield lake
    lake.stop()


def test_a_whole_job(lake: RestLake, tmp_path: Path) -> None:
    lake.append(DS, pa.Table.from_pylist(document_rows()))
    output = lake.address.replace("table", "out")
    spec = fake_spec(
        tmp_path,
        input={"uri": lake.address, "key": "row_key"},
        output={"uri": output, "staging_uri": lake.staging},
    )
    finish(plan_job(spec, DS))
    found = lake.catalog.load_table("ns.out").scan().to_arrow()
    assert sorted(found["row_key"].to_pylist()) == sorted(r["row_key"] for r in document_rows())


@pytest.mark.parametrize("status", [500, 503])
def test_a_commit_with_an_unknown_state_is_looked_up_and_published_once(
    lake: RestLake, status: int
) -> None:
    table = open_lake(lake)
    for number, faults in enumerate([[], [(status, True)], [(status, False)] * 3]):
        lake.faults = faults
        publish(table, numbers(number), of_plan(f"p{number}"))
        assert values(table) == [number] and len(lake.load().snapshots()) == number + 1


def test_a_token_that_ends_is_renewed_if_it_can_be(
    lake: RestLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = open_lake(lake)
    lake.configure(monkeypatch, "TOKEN", CREDENTIAL="id:secret")
    table = open_lake(lake)

    def end(real: Any, *args: Any, **kwargs: Any) -> Any:
        lake.tokens.append("another")
        return real(*args, **kwargs)

    with wrapped(lake.read, end), wrapped(lake.commit, end):
        publish(table, numbers(1))
    assert values(table) == [1]
    with pytest.raises(StorageError, match="the token has ended"):
        values(fixed)


def test_when_lent_credentials_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials.time, "time", lambda: 1000.0)
    token = {"s3.session-token": "t"}
    for properties, seconds in (
        ({"s3.region": "eu"}, math.inf),
        (token, 675),  # of the shortest time that there is
        ({**token, "s3.session-token-expires-at-ms": "1100000"}, 75),
        ({"gcs.oauth2.token": "t", "gcs.oauth2.token-expires-at": "1200000"}, 150),
        ({**token, "expiration-time": "1100000"}, 75),
        ({**token, "expiration-time": "tomorrow"}, 675),
        ({**token, "expiration-time": "900000"}, 1),
    ):
        assert credentials._renewal(PyArrowFileIO(properties)) == 1000 + seconds


@pytest.mark.parametrize("lake_uri", ["s3"], indirect=True)
def test_credentials_that_end_while_a_plan_reads_and_a_commit_writes(
    lake: RestLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: set[str] = set()
    endpoint, stop = serve(with_keys(create_backend_app("s3"), over))
    lake.lends = {"s3.endpoint": endpoint, "s3.region": "us-east-1"}
    kept = ("ENDPOINT", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION")
    lake.configure(monkeypatch, *(f"S3__{name}" for name in kept))
    hours, now = [0], time.time
    monkeypatch.setattr(credentials.time, "time", lambda: now() + hours[0] * HOUR_S)

    def end_hour(real: Any, *args: Any) -> Any:
        answer = real(*args)
        hours[0] += 1
        over.update(f"key-{number + 1}" for number in range(lake.num_lent))
        return answer

    try:
        table = open_lake(lake)
        with wrapped((IcebergStaging, "_put"), end_hour):
            publish(table, numbers(*range(10)))
        snapshot = table.snapshot(DS)
        end_hour(list)
        assert sum(batch.num_rows for batch in table.scan(snapshot, ["n"])) == 10
        num_lent = lake.num_lent
        assert table.footer(snapshot, snapshot.files[0]).num_rows == 10
        assert lake.num_lent == num_lent
        over.add(f"key-{num_lent}")  # before its time
        with pytest.raises(StorageError, match="can't be read"):
            list(table.scan(snapshot, ["n"]))
    finally:
        stop()
