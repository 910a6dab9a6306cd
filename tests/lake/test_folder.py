"""One suite for folders on local disk and on S3."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from batchllm_operator.errors import SpecError, StorageError
from batchllm_operator.lake import Folder


@pytest.fixture
def folder(lake_uri: str) -> Folder:
    return Folder.open(lake_uri).child("table")


def elsewhere(folder: Folder) -> Folder:
    """The same folder, as another process would open it."""
    fs = folder.fs
    return Folder(fsspec.filesystem(fs.protocol[0], skip_instance_cache=True), folder.path)


def test_what_is_written_is_read(folder: Folder) -> None:
    folder.write_bytes("manifest.json", b"{}")
    assert folder.read_bytes("manifest.json") == b"{}"
    with folder.open_file("manifest.json") as file:
        file.seek(1)
        assert file.read() == b"}"


@pytest.mark.parametrize("data", [b"", b"\0\xff\n", b"x" * (3 << 20)])
def test_sha256_is_that_of_the_content(folder: Folder, data: bytes) -> None:
    folder.write_bytes("data", data)
    assert folder.sha256("data") == hashlib.sha256(data).hexdigest()
    assert folder.read_bytes("data") == data


def test_a_write_replaces_what_was_there(folder: Folder) -> None:
    folder.write_bytes("report.json", b"a long first version")
    folder.write_bytes("report.json", b"second")
    assert folder.read_bytes("report.json") == b"second"
    assert list(folder.find()) == ["report.json"]


def test_publish_file_creates_folders_and_replaces(folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "spooled"
    for data in (b"first", b"second"):
        source.write_bytes(data)
        folder.publish_file(source, "ds=2026-01-31/data.parquet")
        assert folder.read_bytes("ds=2026-01-31/data.parquet") == data
    assert source.read_bytes() == b"second"  # copied, not moved
    assert list(folder.find()) == ["ds=2026-01-31/data.parquet"]


def test_find_is_relative_sorted_and_has_sizes(folder: Folder) -> None:
    for name in ("b", "a/y z", "a/x", "c/d/e"):
        folder.write_bytes(name, name.encode())
    found = folder.find()
    assert list(found) == ["a/x", "a/y z", "b", "c/d/e"]
    assert [details["size"] for details in found.values()] == [3, 5, 1, 5]


def test_find_does_not_see_a_sibling_with_the_same_beginning(lake_uri: str) -> None:
    parent = Folder.open(lake_uri)
    parent.child("plan").write_bytes("a", b"")
    parent.child("plan-2").write_bytes("b", b"")
    assert list(parent.child("plan").find()) == ["a"]


def test_subfolder_names(folder: Folder) -> None:
    for name in ("shard-1/part", "shard-0/part", "shard-0/deep/part", "report.json"):
        folder.write_bytes(name, b"")
    assert folder.subfolder_names() == ["shard-0", "shard-1"]
    assert folder.child("shard-1").subfolder_names() == []


def test_exists(folder: Folder) -> None:
    assert not folder.exists()
    assert not folder.exists("runs")
    folder.write_bytes("runs/part", b"")
    assert folder.exists()
    assert folder.exists("runs")
    assert folder.exists("runs/part")
    assert not folder.exists("runs/par")


def test_a_folder_that_is_not_there_holds_nothing(folder: Folder) -> None:
    assert folder.find() == {}
    assert folder.subfolder_names() == []


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
    assert folder.find() == {}
    other.write_bytes("ledger.json", b"1")
    assert folder.exists("ledger.json")
    assert list(folder.find()) == ["ledger.json"]
    assert folder.subfolder_names() == []
    other.write_bytes("runs/part", b"")
    assert folder.subfolder_names() == ["runs"]


def test_a_file_that_another_process_replaced_is_read_anew(folder: Folder) -> None:
    folder.write_bytes("report.json", b"1")
    assert list(folder.find()) == ["report.json"]
    elsewhere(folder).write_bytes("report.json", b"longer than before")
    assert folder.read_bytes("report.json") == b"longer than before"
    assert folder.sha256("report.json") == hashlib.sha256(b"longer than before").hexdigest()


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


def test_a_local_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Whoever has the old file open goes on reading the old content."""
    folder = Folder.open(str(tmp_path))
    folder.write_bytes("a", b"old content")
    with folder.open_file("a") as file:
        assert file.read(3) == b"old"
        folder.write_bytes("a", b"new")
        assert file.read() == b" content"


WRITES: list[Callable[[Folder, Path], object]] = [
    lambda folder, source: folder.write_bytes("a/b", b"x"),
    lambda folder, source: folder.publish_file(source, "a/b"),
]
READS: list[Callable[[Folder, Path], object]] = [
    lambda folder, source: folder.read_bytes("a"),
    lambda folder, source: folder.sha256("a"),
    lambda folder, source: folder.exists(),
    lambda folder, source: folder.exists("a"),
    lambda folder, source: folder.find(),
    lambda folder, source: folder.subfolder_names(),
]


@pytest.mark.parametrize("write", WRITES, ids=["write_bytes", "publish_file"])
def test_a_file_where_a_folder_should_be(
    tmp_path: Path, write: Callable[[Folder, Path], object]
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    (tmp_path / "table").write_bytes(b"not a folder")
    with pytest.raises(StorageError, match="table/a/b"):
        write(Folder.open(str(tmp_path / "table")), source)


@pytest.mark.parametrize("write", WRITES, ids=["write_bytes", "publish_file"])
def test_writing_into_a_missing_bucket(
    s3_environment: None, tmp_path: Path, write: Callable[[Folder, Path], object]
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    with pytest.raises(StorageError, match="s3://no-such-bucket"):
        write(Folder.open("s3://no-such-bucket/table"), source)


@pytest.mark.parametrize("use", WRITES + READS)
def test_an_unreachable_endpoint(
    fresh_s3_client: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    use: Callable[[Folder, Path], object],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    source = tmp_path / "source"
    source.write_bytes(b"x")
    with pytest.raises(StorageError, match="s3://bucket/table"):
        use(Folder.open("s3://bucket/table"), source)


def test_missing_credentials(fresh_s3_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="credentials"):
        Folder.open("s3://bucket/table").write_bytes("a", b"x")
