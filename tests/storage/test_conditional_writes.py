"""Stores that accept conditional writes and ignore them are refused before work is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem
from support.fake_job import DS, document_rows, fake_spec, write_table

from batchllm_operator.errors import StorageError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.storage import Folder

Put = Callable[[dict[str, Any]], None]


def watch_puts(monkeypatch: pytest.MonkeyPatch, around: Put) -> None:
    """While it lasts, S3's clients show `around` the arguments of each `put_object` first."""
    real = S3FileSystem._call_s3

    async def call(self: S3FileSystem, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "put_object":
            around(kwargs)
        return await real(self, method, *args, **kwargs)

    def call_now(self: S3FileSystem, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call(self, *args, **kwargs), self.loop).result()

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    monkeypatch.setattr(S3FileSystem, "call_s3", call_now)


def ignore(monkeypatch: pytest.MonkeyPatch, *conditions: str) -> None:
    """S3 accepts the conditions and doesn't care whether they hold."""

    def around(arguments: dict[str, Any]) -> None:
        for condition in conditions:
            arguments.pop(condition, None)

    watch_puts(monkeypatch, around)


def test_a_claim_at_a_store_that_ignores_conditions_is_refused(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore(monkeypatch, "IfNoneMatch")
    folder = Folder.open(f"{s3_bucket}/runs")
    with pytest.raises(StorageError, match=r"ignores conditional writes \(If-None-Match\).*newer"):
        folder.create("claim.json", b"mine")
    assert folder.find() == {}


@pytest.mark.parametrize("condition", ["IfNoneMatch", "IfMatch"])
@pytest.mark.parametrize("where", ["plans", "output"])
def test_a_plan_for_a_store_that_ignores_conditions_is_refused(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, condition: str, where: str
) -> None:
    """Before any row is read: a broken claim would be seen only when texts are there twice."""
    write_table(tmp_path / "documents", document_rows())
    places = {"uri": str(tmp_path / "out"), "staging_uri": str(tmp_path / "staging")}
    places["uri" if where == "output" else "staging_uri"] = f"{s3_bucket}/there"
    spec = fake_spec(tmp_path, output={**places, "carry": []})
    ignore(monkeypatch, condition)
    if (where, condition) == ("plans", "IfMatch"):  # plans are never replaced
        plan_job(spec, DS)
        return
    with pytest.raises(StorageError, match="ignores conditional writes"):
        plan_job(spec, DS)
    assert Folder.open(s3_bucket).find() == {}


def test_a_delta_table_at_a_store_that_ignores_conditions_is_refused(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore(monkeypatch, "IfNoneMatch")
    with pytest.raises(StorageError, match="ignores conditional writes"):
        open_table(f"delta+{s3_bucket}/out", "ds").check_outputs(DS, pa.schema([("n", pa.int64())]))


def test_a_store_without_conditions_is_told_from_one_that_fails(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: dict[str, dict[str, Any]] = {
        "Error": {"Code": "NotImplemented"},
        "ResponseMetadata": {"HTTPStatusCode": 501},
    }

    def around(arguments: dict[str, Any]) -> None:
        if "IfNoneMatch" in arguments:
            raise OSError("refused") from ClientError(answer, "PutObject")

    watch_puts(monkeypatch, around)
    with pytest.raises(StorageError, match="doesn't know conditional writes"):
        Folder.open(s3_bucket).create("claim.json", b"mine")
    answer["ResponseMetadata"]["HTTPStatusCode"] = 403
    with pytest.raises(StorageError, match=r"claim\.json: refused"):
        Folder.open(s3_bucket).create("claim.json", b"mine")


def test_a_plan_needs_no_right_to_write_the_output(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only commit does, which may be another process with another role."""

    def around(arguments: dict[str, Any]) -> None:
        raise PermissionError("denied")

    write_table(tmp_path / "documents", document_rows())
    places = {"uri": f"{s3_bucket}/out", "staging_uri": str(tmp_path / "staging")}
    watch_puts(monkeypatch, around)
    plan_job(fake_spec(tmp_path, output={**places, "carry": []}), DS)


def test_a_bucket_is_tried_once(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    watch_puts(monkeypatch, lambda arguments: keys.append(arguments["Key"]))
    for number in range(3):
        assert Folder.open(f"{s3_bucket}/{number}").create("claim.json", b"mine")
    assert len([key for key in keys if "_probe-" in key]) == 2
    assert len(keys) == 5
    assert len(Folder.open(s3_bucket).find()) == 3
