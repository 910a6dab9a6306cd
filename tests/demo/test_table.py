"""The demo's table, and the documents and headings that it is made of."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchllm_operator.demo import table
from batchllm_operator.demo.table import (
    DEMO_SCHEMA,
    DemoDocument,
    build_demo_table,
    clip,
    demo_documents,
    headings_of,
)
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
    queries_per_document = Counter(row["document"] for row in rows)
    documents_per_query = Counter(row["query"] for row in rows)
    assert sum(count >= 3 for count in queries_per_document.values()) > 0.8 * len(
        queries_per_document
    )
    assert sum(count for count in documents_per_query.values() if count > 1) > 0.5 * len(rows)


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


def test_spellings_of_one_heading_are_one_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = (
        DemoDocument("a", "text of a", ("Quick Start", "Only here")),
        DemoDocument("b", "text of b", ("Quick start",)),
        DemoDocument("c", "text of c", ("Quick start",)),
        DemoDocument("d", "text of c", ("Quick start",)),
        DemoDocument("e", "text of e", ()),
    )
    monkeypatch.setattr(table, "demo_documents", lambda: documents)
    monkeypatch.setattr(table, "_MAX_QUERIES", 1)
    summary = build_demo_table(tmp_path, ds=DS)
    rows = sorted(read_rows(tmp_path), key=lambda row: row["snippet_id"])
    assert [(row["snippet_id"], row["query"]) for row in rows] == [
        ("a:0", "Quick start"),
        ("b:0", "Quick start"),
        ("c:0", "Quick start"),
    ]
    assert summary.startswith("3 rows (3 documents, 1 different query) in ")


def test_no_documents_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "demo_documents", lambda: ())
    with pytest.raises(TableError, match="nothing to make a table of"):
        build_demo_table(tmp_path / "documents", ds=DS)
    assert not (tmp_path / "documents").exists()


@pytest.mark.parametrize("ds", ["", "..", "a/b"])
def test_ds_must_be_able_to_name_a_partition(tmp_path: Path, ds: str) -> None:
    with pytest.raises(TableError, match="can't name a partition"):
        build_demo_table(tmp_path, ds=ds)


# Documents and their headings


def test_markdown_headings_are_plain_text_without_code_and_versions() -> None:
    text = """\
# My *tool* ![badge](http://x/y.svg)

## Installation ##

run it:
```
# not a heading
```

## 1.2.3
## [Usage](http://x)
Quick start
-----------
## usage
"""
    assert headings_of(text) == ("My *tool", "Installation", "Usage", "Quick start")


def test_rst_headings_are_underlined_lines() -> None:
    text = """\
=====
Tool
=====

Getting `started <http://x>`_
=============================

Usage
~~~~~

  Example
  -------

License
'''''''
"""
    assert headings_of(text) == ("Tool", "Getting started", "Usage", "License")


def test_clip_ends_at_a_line_break() -> None:
    assert clip("one\ntwo\nthree", 9) == "one\ntwo"
    assert clip("one\ntwo", 7) == "one\ntwo"
    assert clip("a" * 10, 4) == "aaaa"


def test_documents_are_sorted_clipped_and_without_this_package() -> None:
    documents = demo_documents(max_chars=1_000)
    packages = [document.package for document in documents]
    assert packages == sorted(set(packages))
    assert "batchllm-operator" not in packages
    assert all(0 < len(document.text) <= 1_000 for document in documents)
    assert len(documents) >= 50


def test_documents_are_the_same_where_setuptools_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What setuptools carries is on sys.path from then on, and isn't the environment's."""
    setuptools = find_spec("setuptools")
    assert setuptools is not None and setuptools.origin is not None
    carried = str(Path(setuptools.origin).with_name("_vendor"))
    assert Path(carried).is_dir()
    found = []
    for paths in ([path for path in sys.path if path != carried], [carried, *sys.path]):
        monkeypatch.setattr(sys, "path", paths)
        found.append(demo_documents())
    assert found[0] == found[1]
