"""Folders: on local disk, and where S3 is told from it. The whole suite on S3 is in `full`."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from botocore.session import Session
from fsspec.implementations.local import LocalFileSystem

from batchllm_operator.errors import SpecError, StorageError
from batchllm_operator.storage import Folder, hash_files, read_files, remove_files
from batchllm_operator.storage.s3 import S3Files


@pytest.fixture
def folder(lake_uri: str) -> Folder:
    return Folder.open(lake_uri).child("table")


def elsewhere(folder: Folder) -> Folder:
    """The same folder, as another process would open it."""
    fs = folder.fs
    return Folder(type(fs)(*fs.storage_args, skip_instance_cache=True), folder.path)


@pytest.mark.parametrize("data", [b"", b"\0\xff\n", b"x" * (3 << 20)])
def test_what_is_written_is_read(folder: Folder, data: bytes) -> None:
    folder.write_bytes("data", b"a long first version")
    folder.write_bytes("data", data)
    assert folder.read_bytes("data") == data
    assert folder.sha256("data") == hashlib.sha256(data).hexdigest()
    with folder.open_file("data") as file:
        file.seek(1)
        assert file.read() == data[1:]
    assert list(folder.find()) == ["data"]


def test_publish_file_creates_folders_and_replaces(folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "spooled"
    for data in (b"first", b"second"):
        source.write_bytes(data)
        folder.publish_file(source, "ds=2026-01-31/data.parquet")
        assert folder.read_bytes("ds=2026-01-31/data.parquet") == data
    assert source.read_bytes() == b"second"  # copied, not moved
    assert list(folder.find()) == ["ds=2026-01-31/data.parquet"]


def test_find_is_relative_sorted_and_has_sizes(folder: Folder) -> None:
    assert (folder.find(), folder.subfolder_names()) == ({}, [])  # it isn't there
    for name in ("b", "a/y z", "a/x", "c/d/e"):
        folder.write_bytes(name, name.encode())
    found = folder.find()
    assert list(found) == ["a/x", "a/y z", "b", "c/d/e"]
    assert [details["size"] for details in found.values()] == [3, 5, 1, 5]
    folder.child("a-2").write_bytes("x", b"")
    assert list(folder.child("a").find()) == ["x", "y z"]
    assert folder.subfolder_names() == ["a", "a-2", "c"]
    assert folder.child("a").subfolder_names() == []


def test_exists(folder: Folder) -> None:
    assert not folder.exists()
    assert not folder.exists("runs")
    folder.write_bytes("runs/part", b"")
    assert all(map(folder.exists, ("", "runs", "runs/part")))
    assert not folder.exists("runs/par")


def test_a_missing_file_is_file_not_found(folder: Folder) -> None:
    folder.write_bytes("there", b"")
    for read in (folder.read_bytes, folder.sha256):
        with pytest.raises(FileNotFoundError):
            read("absent")
        with pytest.raises(FileNotFoundError):
            read("no/such/folder/absent")


def test_an_error_of_the_reader_is_not_blamed_on_the_storage(folder: Folder) -> None:
    """Whoever reads may fail for reasons of its own: a broken footer, an engine, a full disk."""
    folder.write_bytes("a", b"x")
    with pytest.raises(OSError, match="of my own"), folder.open_file("a"):
        raise OSError("of my own")


def test_another_process_is_seen_at_once(folder: Folder) -> None:
    """Airflow tasks run on different machines; no answer may come from a cache."""
    other = elsewhere(folder)
    assert not folder.exists("ledger.json")
    assert (folder.find(), folder.subfolder_names()) == ({}, [])
    for data in (b"1", b"longer than before"):
        other.write_bytes("ledger.json", data)
        assert folder.exists("ledger.json")
        assert list(folder.find()) == ["ledger.json"]
        assert folder.read_bytes("ledger.json") == data
        assert folder.sha256("ledger.json") == hashlib.sha256(data).hexdigest()
    other.write_bytes("runs/part", b"")
    assert folder.subfolder_names() == ["runs"]


def test_the_uri_opens_the_same_folder(folder: Folder) -> None:
    folder.write_bytes("a", b"x")
    assert Folder.open(folder.uri).read_bytes("a") == b"x"
    assert Folder.open(folder.uri + "/").read_bytes("a") == b"x"
    assert folder.child("b", "c").uri == f"{folder.uri}/b/c"


@pytest.mark.parametrize("name", ["with space", "50%", "%2F", "naïve-表", "a=b", "..x"])
def test_awkward_names(folder: Folder, name: str) -> None:
    folder.child(name).write_bytes("data", b"x")
    assert folder.subfolder_names() == [name]
    assert list(folder.find()) == [f"{name}/data"]
    assert folder.child(name).read_bytes("data") == b"x"


def test_an_unknown_kind_of_uri_is_a_fault_of_the_spec() -> None:
    with pytest.raises(SpecError, match=r"nosuch://bucket/table"):
        Folder.open("nosuch://bucket/table")


def test_a_local_write_leaves_no_temporary(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path))
    source = tmp_path.parent / f"{tmp_path.name}-source"
    source.write_bytes(b"x")
    folder.write_bytes("a", b"1")
    folder.publish_file(source, "b")
    with pytest.raises((FileNotFoundError, StorageError)):
        folder.publish_file(tmp_path / "absent", "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_local_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(str(tmp_path))
    folder.write_bytes("a", b"old")

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left"):
        folder.write_bytes("a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_of_many_that_create_one_name_one_has_written_it(folder: Folder) -> None:
    together = threading.Barrier(8)

    def create(idx: int) -> list[int]:
        won = []
        for number in range(5):
            together.wait()
            if folder.create(f"attempt-{number}/claim.json", str(idx).encode()):
                won.append(number)
        return won

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert sorted(number for numbers in won for number in numbers) == list(range(5))
    for idx, numbers in enumerate(won):
        for number in numbers:
            assert folder.read_bytes(f"attempt-{number}/claim.json") == str(idx).encode()
    assert len(folder.find()) == 5, "no temporary file is left"


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lost_answer_is_told_from_a_lost_race(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """The write was made, by us or by another, and the connection broke."""
    original_put, original_link = folder.fs.pipe_file, Path.hardlink_to

    def put(path: str, data: bytes, **options: Any) -> None:
        original_put(path, data if is_ours else b"theirs", **options)
        raise ReadTimeoutError(endpoint_url="s3")

    def link(self: Path, target: Path) -> None:
        if not is_ours:
            target.write_bytes(b"theirs")
        original_link(self, target)
        raise FileExistsError(errno.EEXIST, "as NFS says when the answer to a link was lost")

    monkeypatch.setattr(folder.fs, "pipe_file", put)
    monkeypatch.setattr(Path, "hardlink_to", link)
    assert folder.create("claim.json", b"ours") is is_ours


def test_a_create_that_failed_says_so(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(folder.fs, "pipe_file", fail)
    monkeypatch.setattr(Path, "hardlink_to", fail)
    with pytest.raises(StorageError, match=r"claim\.json: .*no room"):
        folder.create("claim.json", b"ours")
    assert folder.find() == {}


def test_two_conditional_writes_at_once_are_made_again(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(s3_bucket)
    waits: list[float] = []
    original = folder.fs.pipe_file

    def put(path: str, data: bytes, **options: Any) -> None:
        if len(waits) < 2:
            code = {"Code": "ConditionalRequestConflict", "Message": "in progress"}
            raise OSError(errno.EIO, "in progress") from ClientError({"Error": code}, "PutObject")
        original(path, data, **options)

    monkeypatch.setattr(folder.fs, "pipe_file", put)
    monkeypatch.setattr(time, "sleep", waits.append)
    assert folder.create("claim.json", b"ours")
    assert len(waits) == 2 and waits[0] < waits[1]


def test_a_disk_without_hard_links_creates_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    folder = Folder.open(str(tmp_path))
    assert folder.create("claim.json", b"first")
    assert not folder.create("claim.json", b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["claim.json"]


def test_a_file_that_vanishes_while_it_is_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(str(tmp_path))
    for name in ("a/1", "a/2", "b/3"):
        folder.write_bytes(name, b"")
    original = LocalFileSystem.info

    def info(self: LocalFileSystem, path: Any, **options: Any) -> Any:
        if getattr(path, "name", "") == "1":
            raise FileNotFoundError(path)
        return original(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", info)
    assert list(folder.find()) == ["a/2", "b/3"]


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.open(str(tmp_path))
    folder.write_bytes("a/1", b"")
    original = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("/a"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        folder.find()


def test_many_files_are_read_hashed_and_removed(folder: Folder) -> None:
    contents = {f"part-{idx}": b"%d" % idx * 3 for idx in range(20)}
    for name, data in contents.items():
        folder.write_bytes(name, data)
    names = [*contents, "absent"]
    assert read_files(folder, names) == contents
    assert hash_files(folder, names) == {
        name: hashlib.sha256(data).hexdigest() for name, data in contents.items()
    }
    remove_files(folder, names[5:])
    assert list(folder.find()) == sorted(names[:5])


def test_what_goes_wrong_with_one_of_many_files_is_raised(tmp_path: Path) -> None:
    folder = Folder.open(str(tmp_path))
    folder.write_bytes("a/b", b"")
    with pytest.raises(StorageError, match="a: "):
        hash_files(folder, ["a/b", "a"])


def test_s3_is_retried_as_botocore_does(
    fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    config = Folder.open("s3://bucket").fs.s3.meta.config
    assert config.retries == {"mode": "legacy"}
    policies = Session().get_component("data_loader").load_data("_retry")
    assert policies["retry"]["__default__"]["max_attempts"] == 5
    assert (config.connect_timeout, config.read_timeout) == (10, 30)


def test_fsspecs_configuration_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    config = S3Files.at("s3://bucket").config_kwargs
    assert (config["read_timeout"], config["connect_timeout"]) == (7, 10)


WRITES: list[Callable[[Folder, Path], object]] = [
    lambda folder, source: folder.write_bytes("a/b", b"x"),
    lambda folder, source: folder.publish_file(source, "a/b"),
    lambda folder, source: folder.create("a/b", b"x"),
]
READS: list[Callable[[Folder, Path], object]] = [
    lambda folder, source: folder.read_bytes("a"),
    lambda folder, source: folder.sha256("a"),
    lambda folder, source: folder.exists(),
    lambda folder, source: folder.exists("a"),
    lambda folder, source: folder.find(),
    lambda folder, source: folder.subfolder_names(),
]


@pytest.mark.parametrize("write", WRITES, ids=["write_bytes", "publish_file", "create"])
def test_writing_where_no_folder_can_be(
    s3_environment: None, tmp_path: Path, write: Callable[[Folder, Path], object]
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    (tmp_path / "table").write_bytes(b"not a folder")
    for uri in (str(tmp_path / "table"), "s3://no-such-bucket/table"):
        with pytest.raises(StorageError, match=uri):
            write(Folder.open(uri), source)


def test_an_unreachable_endpoint(
    fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    source = tmp_path / "source"
    source.write_bytes(b"x")
    folder = Folder.open("s3://bucket/table")
    for use in WRITES + READS:
        with pytest.raises(StorageError, match="s3://bucket/table"):
            use(folder, source)


def test_missing_credentials(fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="credentials"):
        Folder.open("s3://bucket/table").write_bytes("a", b"x")
