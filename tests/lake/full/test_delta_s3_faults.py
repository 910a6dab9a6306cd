"""Delta tables on S3, which loses answers and refuses requests."""

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from lake.test_tables import numbers, values
from support.benchmark_modules import load
from support.lake_tables import DS, of_plan, publish

from batchllm_operator.errors import CommitUnknownError, StorageError
from batchllm_operator.lake.delta.table import DeltaTable
from batchllm_operator.storage import Folder

s3: Any = load("faults.s3")


class LossyProxy(s3.FaultyProxy):  # type: ignore[misc]  # loaded by its name
    """Hands requests on to an S3 server, and loses answers to commits while it is told to."""

    answers_to_lose = 0
    is_cut = False
    refused = ""
    """A part of the paths that are answered with `errors["refused"]`."""

    def fault_of(self, command: str, path: str) -> str:
        if self.is_cut:
            return "kill_before"  # the connection, here
        if "refused" in self.errors and self.refused in path:
            return "refused"
        if command == "PUT" and "_delta_log/" in path and self.answers_to_lose:
            self.answers_to_lose -= 1
            self.is_cut = self.answers_to_lose > 9
            return "lost_response"
        return ""


@pytest.fixture
def proxy(
    s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LossyProxy]:
    """What delta-rs talks to; s3fs is connected to the server behind, and stays so."""
    Folder.open(s3_bucket).exists("any")
    server = LossyProxy(s3_endpoint.removeprefix("http://"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("attempts", ["1", "3"])
@pytest.mark.parametrize("was_there", [True, False], ids=["filled", "new table"])
def test_s3_that_loses_the_answer_to_a_commit(
    s3_bucket: str,
    proxy: LossyProxy,
    monkeypatch: pytest.MonkeyPatch,
    attempts: str,
    was_there: bool,
) -> None:
    """delta-rs tries again, and is told that somebody was first: it was itself."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    if was_there:
        publish(table, numbers(1), of_plan("a"))
    proxy.answers_to_lose = 1
    before = of_plan("a") if was_there else None
    publish(table, numbers(2), of_plan("b"), replaces=before)
    assert proxy.answers_to_lose == 0
    assert values(table) == [2]
    assert table.snapshot(DS).version == f"delta:{int(was_there)}"


def test_s3_that_goes_away_in_a_commit(s3_bucket: str, proxy: LossyProxy) -> None:
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    publish(table, numbers(1), of_plan("a"))
    proxy.answers_to_lose = 99
    with pytest.raises(CommitUnknownError, match=r"no answer came .*; commit again to find out"):
        publish(table, numbers(2), of_plan("b"), replaces=of_plan("a"))
    with pytest.raises(StorageError):
        table.published(DS)  # not "nothing"
    with pytest.raises(StorageError):
        table.partitions()
    proxy.is_cut, proxy.answers_to_lose = False, 0
    publish(table, numbers(2), of_plan("b"), replaces=of_plan("a"))
    assert values(table) == [2]
    assert table.snapshot(DS).version == "delta:1"


@pytest.mark.parametrize("status", [403, 500, 503])
@pytest.mark.parametrize("request_path", ["list-type=2", ".json"])
def test_s3_that_refuses_requests(
    s3_bucket: str, proxy: LossyProxy, status: int, request_path: str
) -> None:
    """An unreadable log is the storage's fault, and neither a damaged table nor none."""
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    publish(table, numbers(1), of_plan("a"))
    snapshot = table.snapshot(DS)
    proxy.refused = request_path
    proxy.errors["refused"] = (status, b"<Error><Code>SlowDown</Code></Error>")
    again = DeltaTable(f"{s3_bucket}/table", "ds")
    with pytest.raises(StorageError):
        again.published(DS)
    [batch] = again.scan(snapshot, ["n"])  # whose files are known
    assert batch.to_pylist() == [{"n": 1}]


def test_no_secret_gets_into_errors(
    s3_bucket: str, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 servers echo a token that they don't know."""
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, f"canary-{name}")
    table = DeltaTable(f"{s3_bucket}/table", "ds")
    body = b"<Error><Code>InvalidToken</Code><Token-0>canary-AWS_SESSION_TOKEN</Token-0></Error>"
    proxy.errors["refused"] = (403, body)
    with pytest.raises(StorageError) as caught:
        table.published(DS)
    assert "InvalidToken" in str(caught.value)
    assert "canary" not in "".join(traceback.format_exception(caught.value))
