"""The demo's table, and the documents that it is made of."""

import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import demo_table as table
import pyarrow.parquet as pq
import pytest
from demo_table import (
    DEMO_SCHEMA,
    QUERIES,
    DemoDocument,
    build_demo_table,
    clip,
    demo_documents,
    plain_text,
)

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


def test_table_has_rows_with_unique_keys_and_documents_of_a_length(folder: Path) -> None:
    file = pq.ParquetFile(folder / f"ds={DS}" / "part-0.parquet")
    assert file.schema_arrow.equals(DEMO_SCHEMA)
    rows = read_rows(folder)
    assert len(rows) == 30 * len(QUERIES)
    assert len({row["snippet_id"] for row in rows}) == len(rows)
    assert len({(row["document"], row["query"]) for row in rows}) == len(rows)
    assert len({row["document"] for row in rows}) == 30
    assert all(row["document"].strip() and row["query"].strip() for row in rows)
    assert all(500 <= len(row["document"]) <= 1_200 for row in rows)


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


def test_documents_are_long_enough_and_none_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough without their badges."""
    text = "A sentence.\n" * 50
    documents = (
        DemoDocument("a", text),
        DemoDocument("b", f"![badge](http://x)\n{text}"),
        DemoDocument("c", "A sentence.\n" + "![badge](http://x)\n" * 50),
        DemoDocument("d", f"D\n{text}"),
    )
    monkeypatch.setattr(table, "demo_documents", lambda max_chars: documents)
    summary = build_demo_table(tmp_path, ds=DS)
    assert {row["package"] for row in read_rows(tmp_path)} == {"a", "d"}
    assert summary == "10 rows (2 documents, 5 queries)"


# Documents and their text


def test_markdown_keeps_its_headings_lists_and_what_links_say() -> None:
    text = """\
<h1 align="center">My tool</h1> <!-- of
two lines -->
[![badge](http://x/y.svg)](http://x) ![badge][y]

## Installation

```
pip install [my-tool]
```

[Docs](http://x) | [Chat](http://y)

See [the docs](http://x)
and [more][y].
- one
- two

[y]: http://x/y
"""
    assert plain_text(text) == (
        "My tool\n\n## Installation\n\nSee the docs and more.\n- one\n- two"
    )


def test_rst_loses_its_underlines_directives_and_comments() -> None:
    text = """\
====
Tool
====

.. Licensed to me
   under a license

.. image:: http://x/y.svg
   :target: http://x

|Build Status| |PyPI|_

Getting `started <http://x>`_
=============================

.. code-block:: bash

   pip install tool

.. |PyPI| image:: http://x
"""
    assert plain_text(text) == "Tool\n\nGetting started\n\n   pip install tool"


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
