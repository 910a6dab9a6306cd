"""Files replaced only if they are the ones that were seen."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from batchllm_operator.errors import StorageError
from batchllm_operator.lake.parquet.table import etag_of, exclusive, replace_file
from batchllm_operator.storage import Folder


def seen(folder: Folder, name: str) -> Any:
    with folder.open_file(name) as file:
        return etag_of(file)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.mark.parametrize("part_bytes", [64 << 20, 6 << 20], ids=["one request", "parts"])
def test_s3_compares(
    s3_bucket: str, source: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr("batchllm_operator.storage.s3._PART_BYTES", part_bytes)
    check_compares(Folder.open(f"{s3_bucket}/table"), source)


def check_compares(folder: Folder, source: Path) -> None:
    """A file is replaced only if it is the one that was seen."""
    data = os.urandom(13 << 20)
    source.write_bytes(data)

    def replace(etag: str | None) -> str:
        refused = replace_file(folder, source, "data", etag=etag)
        if refused is None:
            return "done"
        assert not refused.may_arrive
        return "changed" if refused.may_repeat else "failed"

    assert replace(None) == "done"
    assert folder.read_bytes("data") == data
    assert replace(None) == "changed"
    etag = seen(folder, "data")
    source.write_bytes(b"second")
    assert [replace(etag), replace(etag)] == ["done", "changed"]
    assert folder.read_bytes("data") == b"second"
    folder.remove("data")
    assert replace(etag) == "changed"
    assert list(folder.find()) == []


def test_a_part_that_fails_leaves_no_upload(
    s3_bucket: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.storage.s3._PART_BYTES", 6 << 20)
    folder = Folder.open(f"{s3_bucket}/table")
    source.write_bytes(bytes(13 << 20))
    real = type(folder.fs).call_s3

    def failing(fs: object, method: str, *args: object, **kwargs: object) -> object:
        if method == "upload_part" and kwargs["PartNumber"] == 2:
            raise OSError(5, "connection lost")
        return real(fs, method, *args, **kwargs)

    monkeypatch.setattr(type(folder.fs), "call_s3", failing)
    refused = replace_file(folder, source, "data", etag=None)
    assert refused is not None and refused.may_arrive and "connection lost" in refused.text
    bucket = s3_bucket.removeprefix("s3://")
    assert not folder.fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads")
    assert folder.find() == {}


def _hold(path: str, ready: threading.Event) -> None:
    with exclusive(Folder.open(path), "ds=x"):
        ready.set()
        time.sleep(600)


def test_a_lock_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed so that it can't clean up; its file stays and locks nobody out."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # from where the process loads this file
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), ready))
    holder.start()
    try:
        assert ready.wait(60)
    finally:
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
    assert [path.name for path in tmp_path.iterdir()] == [".ds=x.lock"]
    with exclusive(Folder.open(str(tmp_path)), "ds=x"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"a file")
    with (
        pytest.raises(StorageError, match="can't be locked"),
        exclusive(Folder.open(str(tmp_path / "table")), "ds=x"),
    ):
        pass
