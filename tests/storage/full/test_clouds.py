"""Google Cloud Storage and Azure: what they compare, and what their errors become."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from lake.test_swap import check_compares

from batchllm_operator.errors import MissingLibraryError, SpecError, StorageError, TableError
from batchllm_operator.storage import Folder
from batchllm_operator.storage.failures import http_status

IN_CLOUDS = pytest.mark.parametrize("lake_uri", ["gs", "azure"], indirect=True)


@IN_CLOUDS
def test_a_file_is_replaced_if_it_is_the_one_that_was_seen(lake_uri: str, tmp_path: Path) -> None:
    check_compares(Folder.open(lake_uri), tmp_path / "source")


@IN_CLOUDS
def test_reads_of_an_open_file_are_of_one_version(lake_uri: str) -> None:
    folder = Folder.open(lake_uri)
    folder.write_bytes("data", b"a" * 1000)
    with folder.open_file("data", read_ahead=False) as file:
        assert file.read(10) == b"a" * 10
        folder.write_bytes("data", b"b" * 1000)
        with pytest.raises(OSError) as error:
            file.read(10)
    assert http_status(error.value) == 412 and error.value.errno


@IN_CLOUDS
def test_a_bucket_that_is_not_there_is_an_error_of_the_storage(lake_uri: str) -> None:
    folder = Folder.open(lake_uri.replace("lake-", "nolake-"))
    with pytest.raises(StorageError, match="404"):
        folder.write_bytes("x", b"")
    with pytest.raises(StorageError, match="404"):
        folder.find()


def test_a_key_that_is_refused_is_an_error_of_the_storage(
    azure_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm8ga2V5")
    folder = Folder.open(azure_bucket)
    folder.fs._stores.clear()  # other tests' clients have the right one
    try:
        for ask in (folder.exists, folder.find, lambda: folder.create("x", b"")):
            with pytest.raises(StorageError, match="403") as error:
                ask()
            assert "bm8ga2V5" not in str(error.value)
    finally:
        folder.fs._stores.clear()


def test_busy_storage_is_asked_again(gs_bucket: str, google_storage: Any) -> None:
    folder = Folder.open(gs_bucket)
    google_storage.busy = 2
    assert folder.create("claim", b"mine") and folder.read_bytes("claim") == b"mine"
    google_storage.busy = 9
    with pytest.raises(StorageError, match="429"):
        folder.find()
    assert google_storage.busy == 4  # five requests
    google_storage.busy = 0


def test_an_address_without_an_account_is_a_fault_of_the_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SpecError, match=r"az://nobody/t: .*Account must be specified"):
        Folder.open("az://nobody/t")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "batchllm_operator.storage.clouds", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingLibraryError, match=r"obstore.*extra `clouds`"):
        Folder.open("gs://lake/t")


def test_azure_is_not_sent_a_file_that_it_would_refuse(tmp_path: Path) -> None:
    """One request is at most 5,000 MiB; this one would fail for want of an account."""
    from batchllm_operator.storage.clouds import ObjectStore

    source = tmp_path / "data"
    with source.open("wb") as file:
        file.truncate((5000 << 20) + 1)
    with pytest.raises(TableError, match=r"^az://lake/t/data: .* 5,000 MiB .*5\.24 GB.* Delta"):
        ObjectStore("az").put_if("lake/t/data", source, None)
