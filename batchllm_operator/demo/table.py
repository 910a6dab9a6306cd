"""The demo's lake table: descriptions of installed packages, each with several queries."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import TableError

_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_MAX_DOCUMENTS: Final = 60
_QUERIES_PER_DOCUMENT: Final = 5
_QUERIES: Final = (
    *("installation", "quick start", "license", "requirements", "configuration"),
    *("what it is for", "usage example", "supported Python versions", "how to contribute"),
    *("documentation", "changes of the last release", "command line", "how to run the tests"),
    *("main features", "where to report bugs", "who maintains it", "alternatives", "performance"),
    *("dependencies", "known limitations"),
)
DEMO_SCHEMA: Final = pa.schema(
    [
        pa.field(name, pa.string(), nullable=False)
        for name in ("snippet_id", "package", "document", "query")
    ]
)
"""Columns of the demo table; `snippet_id` is the key, the partition column is in the path."""


def build_demo_table(folder: Path, *, ds: str) -> str:
    """Write partition `ds` of the demo table: `<folder>/ds=<ds>/part-0.parquet`; returns a summary.

    Documents share queries as rows share documents. Rows are in a fixed order that isn't grouped by
    document. One environment always gives the same bytes; an older file is replaced in one step.

    Raises:
        TableError: `ds` can't name a partition, or no installed distribution has a description.
    """
    if not ds or "/" in ds or ds.startswith("."):
        raise TableError(f"demo table {folder}: {ds!r} can't name a partition; use 2026-01-31")
    documents = list(islice(demo_documents().items(), _MAX_DOCUMENTS))
    if not documents:
        raise TableError(
            f"demo table {folder}: no Python distribution installed here has a long description, so"
            " there is nothing to make a table of"
        )
    step = len(_QUERIES) // _QUERIES_PER_DOCUMENT
    rows = [
        {
            "snippet_id": f"{package}:{idx}",
            "package": package,
            "document": text,
            "query": _QUERIES[(number + step * idx) % len(_QUERIES)],
        }
        for number, (package, text) in enumerate(documents)
        for idx in range(_QUERIES_PER_DOCUMENT)
    ]
    # An order that is independent of the row's document.
    rows.sort(key=lambda row: hashlib.sha256(row["snippet_id"].encode()).digest())
    partition_path = folder / f"ds={ds}"
    partition_path.mkdir(parents=True, exist_ok=True)
    unfinished = partition_path / f".part-0.parquet.{os.getpid()}"
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=DEMO_SCHEMA), unfinished)
        unfinished.replace(partition_path / "part-0.parquet")
    finally:
        unfinished.unlink(missing_ok=True)
    return (
        f"{counted(len(rows), 'row')} ({counted(len(documents), 'document')}) in {partition_path}"
    )


def demo_documents(max_chars: int = _MAX_DOCUMENT_CHARS) -> dict[str, str]:
    """Long descriptions of the installed distributions by normalised name, without equal texts.

    Texts are cut at a line break. The same environment always gives the same documents, in the
    order of their names. This package's own description is left out, so that editing the README
    doesn't change the demo.
    """
    # setuptools adds its `_vendor` folder to sys.path when it is imported.
    folders = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    descriptions: dict[str, str] = {}
    for distribution in metadata.distributions(path=folders):
        fields = distribution.metadata.json
        name, text = fields.get("name"), fields.get("description")
        if isinstance(name, str) and isinstance(text, str):  # else it is broken, or has none
            text = "\n".join(line.rstrip() for line in text.strip().splitlines())
            # The first on sys.path is in use.
            descriptions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), text)
    descriptions.pop("batchllm-operator", None)
    packages: dict[str, str] = {}  # the first of those with one text
    for package, text in sorted(descriptions.items()):
        if len(text) >= _MIN_DOCUMENT_CHARS:
            packages.setdefault(text, package)
    return {package: _clip(text, max_chars) for text, package in packages.items()}


def _clip(text: str, max_chars: int) -> str:
    head = text[:max_chars]
    return head if head == text else head[: head.rfind("\n") if "\n" in head else None].rstrip()
