import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchllm_operator.demo import table
from batchllm_operator.demo.table import DEMO_SCHEMA, build_demo_table, demo_documents
from batchllm_operator.errors import TableError

DS = "2026-01-31"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    table = pq.ParquetFile(folder / f"ds={DS}" / "part-0.parquet").read()
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    build_demo_table(folder, ds=DS)
    return folder


def test_table_has_a_few_hundred_rows_with_unique_keys(folder: Path) -> None:
    file = pq.ParquetFile(folder / f"ds={DS}" / "part-0.parquet")
    assert file.schema_arrow.equals(DEMO_SCHEMA)
    rows = read_rows(folder)
    assert 200 <= len(rows) <= 400
    assert len({row["snippet_id"] for row in rows}) == len(rows)
    assert len({(row["document"], row["query"]) for row in rows}) == len(rows)
    assert all(row["document"].strip() and row["query"].strip() for row in rows)
    assert max(len(row["document"]) for row in rows) <= 2_500


def test_documents_have_several_queries_and_queries_recur(folder: Path) -> None:
    rows = read_rows(folder)
    assert set(Counter(row["document"] for row in rows).values()) == {5}
    assert min(Counter(row["query"] for row in rows).values()) > 1


def test_rows_are_not_grouped_by_document(folder: Path) -> None:
    documents = [row["document"] for row in read_rows(folder)]
    neighbours = sum(a == b for a, b in pairwise(documents))
    assert neighbours < 0.1 * len(documents)


def test_same_environment_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    build_demo_table(tmp_path, ds=DS)
    summary = build_demo_table(tmp_path, ds=DS)
    written, before = (path / f"ds={DS}" / "part-0.parquet" for path in (tmp_path, folder))
    assert [*written.parent.iterdir()] == [written]
    assert written.read_bytes() == before.read_bytes()
    assert summary.startswith(f"{len(read_rows(tmp_path))} rows (")


def test_documents_are_sorted_cut_and_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What setuptools carries is on sys.path once it is imported, and isn't the environment's."""
    setuptools = find_spec("setuptools")
    assert setuptools is not None and setuptools.origin is not None
    carried = str(Path(setuptools.origin).with_name("_vendor"))
    assert Path(carried).is_dir()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != carried])
    documents = demo_documents(max_chars=1_000)
    monkeypatch.setattr(sys, "path", [carried, *sys.path])
    assert demo_documents(max_chars=1_000) == documents
    assert list(documents) == sorted(documents) and "batchllm-operator" not in documents
    assert len(documents) >= 50
    for package, whole in demo_documents(10**9).items():
        cut = documents[package]
        assert len(cut) <= 1_000 and whole.startswith(cut)
        assert cut == whole or "\n" in whole[len(cut) :] or "\n" not in cut


def test_no_documents_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "demo_documents", dict)
    with pytest.raises(TableError, match="nothing to make a table of"):
        build_demo_table(tmp_path / "documents", ds=DS)
    assert not (tmp_path / "documents").exists()


@pytest.mark.parametrize("ds", ["", "..", "a/b"])
def test_ds_must_be_able_to_name_a_partition(tmp_path: Path, ds: str) -> None:
    with pytest.raises(TableError, match="can't name a partition"):
        build_demo_table(tmp_path, ds=ds)
