"""Delta tables on S3, which loses answers and refuses requests."""

from __future__ import annotations

import http.client
import threading
import traceback
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from lake.test_delta import DS, by, outputs, values

from batchllm_operator.errors import CommitUnknownError, StorageError
from batchllm_operator.lake.delta.table import DeltaTable
from batchllm_operator.storage import Folder


class LossyProxy(ThreadingHTTPServer):
    """Hands requests on to an S3 server, and loses answers to commits while it is told to."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), LossyHandler)
        self.upstream = endpoint.removeprefix("http://")
        self.answers_to_lose = 0
        self.is_cut = False
        self.refusal: tuple[int, str, bytes] | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no news."""


class LossyHandler(BaseHTTPRequestHandler):
    server: LossyProxy

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.is_cut:
            self.connection.close()
            return
        if proxy.refusal is not None and proxy.refusal[1] in self.path:
            self.answer(proxy.refusal[0], {}, proxy.refusal[2])
            return
        upstream = http.client.HTTPConnection(proxy.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        reply = upstream.getresponse()
        data = reply.read()
        upstream.close()
        if self.command == "PUT" and "_delta_log/" in self.path and proxy.answers_to_lose:
            proxy.answers_to_lose -= 1
            proxy.is_cut = proxy.is_cut or proxy.answers_to_lose > 9
            self.connection.close()
            return
        self.answer(reply.status, dict(reply.getheaders()), data)

    def answer(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815


@pytest.fixture
def proxy(
    s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LossyProxy]:
    """What delta-rs talks to; s3fs is connected to the server behind, and stays so."""
    Folder.open(s3_bucket).exists("any")
    server = LossyProxy(s3_endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("attempts", ["1", "3"])
@pytest.mark.parametrize("was_there", [True, False], ids=["filled", "new table"])
def test_s3_that_loses_the_answer_to_a_commit(
    s3_bucket: str,
    proxy: LossyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: str,
    was_there: bool,
) -> None:
    """delta-rs tries again, and is told that somebody was first: it was itself."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    if was_there:
        table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    proxy.answers_to_lose = 1
    table.publish(by("b"), outputs(tmp_path, by("b"), 2), replaces=by("a") if was_there else None)
    assert proxy.answers_to_lose == 0
    assert values(table) == [2]
    assert table.snapshot(DS).version == f"delta:{int(was_there)}"


def test_s3_that_goes_away_in_a_commit(s3_bucket: str, proxy: LossyProxy, tmp_path: Path) -> None:
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    proxy.answers_to_lose = 99
    data = outputs(tmp_path, by("b"), 2)
    with pytest.raises(CommitUnknownError, match="can't be read; commit again to find out"):
        table.publish(by("b"), data, replaces=by("a"))
    with pytest.raises(StorageError):
        table.published(DS)  # not "nothing"
    with pytest.raises(StorageError):
        table.partitions()
    proxy.is_cut, proxy.answers_to_lose = False, 0
    table.publish(by("b"), data, replaces=by("a"))
    assert values(table) == [2]
    assert table.snapshot(DS).version == "delta:1"


@pytest.mark.parametrize("status", [403, 500, 503])
@pytest.mark.parametrize("request_path", ["list-type=2", ".json"])
def test_s3_that_refuses_requests(
    s3_bucket: str, proxy: LossyProxy, tmp_path: Path, status: int, request_path: str
) -> None:
    """An unreadable log is the storage's fault, and neither a damaged table nor none."""
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    snapshot = table.snapshot(DS)
    proxy.refusal = (status, request_path, b"<Error><Code>SlowDown</Code></Error>")
    for action in (lambda: table.published(DS), lambda: list(table.scan(snapshot, ["n"]))):
        with pytest.raises(StorageError):
            action()


def test_no_secret_gets_into_errors(
    s3_bucket: str, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 servers echo a token that they don't know."""
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, f"canary-{name}")
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    body = b"<Error><Code>InvalidToken</Code><Token-0>canary-AWS_SESSION_TOKEN</Token-0></Error>"
    proxy.refusal = (403, "", body)
    with pytest.raises(StorageError) as caught:
        table.published(DS)
    assert "InvalidToken" in str(caught.value)
    assert "canary" not in "".join(traceback.format_exception(caught.value))
