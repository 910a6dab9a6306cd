"""The demo's lake table: passages of real documentation, each with several queries.

Every machine has such text: long descriptions of installed Python distributions.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import TableError

_MIN_DOCUMENT_CHARS: Final = 400
_MAX_DOCUMENT_CHARS: Final = 2_500
_OWN_DISTRIBUTION: Final = "batchllm-operator"
_MAX_DOCUMENTS: Final = 60
_QUERIES: Final = ("What it does", "Installation", "Usage", "Requirements", "License")
"""Of each document."""
DEMO_SCHEMA: Final = pa.schema(
    [
        pa.field("snippet_id", pa.string(), nullable=False),
        pa.field("package", pa.string(), nullable=False),
        pa.field("document", pa.string(), nullable=False),
        pa.field("query", pa.string(), nullable=False),
    ]
)
"""Columns of the demo table; `snippet_id` is the key, the partition column is in the path."""


def build_demo_table(folder: Path, *, ds: str) -> str:
    """Write partition `ds` of the demo table: `<folder>/ds=<ds>/part-0.parquet`; returns a summary.

    Documents are descriptions of installed distributions, from all over the alphabet. Rows share
    documents as well as queries, and are in a fixed order that isn't grouped by document. One
    environment always gives the same bytes; an older file is replaced in one step.

    Raises:
        TableError: `ds` can't name a partition, or no installed distribution has a long
            description.
    """
    if not ds or "/" in ds or ds.startswith("."):
        raise TableError(f"demo table {folder}: {ds!r} can't name a partition; use 2026-01-31")
    by_text = {document.text: document for document in demo_documents()}  # clipped, some are equal
    num_documents = min(_MAX_DOCUMENTS, len(by_text))
    documents = list(by_text.values())
    chosen = [documents[idx * len(documents) // num_documents] for idx in range(num_documents)]
    if not chosen:
        raise TableError(
            f"demo table {folder}: no Python distribution installed here has a long description,"
            " so there is nothing to make a table of"
        )
    rows = [
        {
            "snippet_id": f"{document.package}:{idx}",
            "package": document.package,
            "document": document.text,
            "query": query,
        }
        for document in chosen
        for idx, query in enumerate(_QUERIES)
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
    documents_and_queries = f"{counted(num_documents, 'document')}, {len(_QUERIES)} queries"
    return f"{counted(len(rows), 'row')} ({documents_and_queries}) in {partition_path}"


@dataclass(frozen=True, slots=True)
class DemoDocument:
    package: str
    """Normalised name of the distribution; identifies the document."""
    text: str
    """The description, clipped at a line break."""


def clip(text: str, max_chars: int) -> str:
    """`text` cut to at most `max_chars` characters, at the last line break if there is one."""
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    at_line = head.rfind("\n")
    return head[:at_line].rstrip() if at_line > 0 else head


def demo_documents(max_chars: int = _MAX_DOCUMENT_CHARS) -> tuple[DemoDocument, ...]:
    """Long descriptions of the installed distributions, sorted by name, without equal texts.

    The same environment always gives the same documents. This package's own
    description is left out, so that editing the README doesn't change the demo.
    """
    return tuple(DemoDocument(package, clip(text, max_chars)) for package, text in _descriptions())


@cache
def _descriptions() -> tuple[tuple[str, str], ...]:
    """(normalised name, whole description) of every distribution with enough text."""
    # setuptools adds its `_vendor` folder to sys.path when it is imported.
    folders = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    by_package: dict[str, str] = {}
    for distribution in metadata.distributions(path=folders):
        fields = distribution.metadata.json
        name, text = fields.get("name"), fields.get("description")
        if isinstance(name, str) and isinstance(text, str):  # else it is broken, or has none
            text = "\n".join(line.rstrip() for line in text.strip().splitlines())
            # The first on sys.path is in use.
            by_package.setdefault(re.sub(r"[-_.]+", "-", name).lower(), text)
    packages: dict[str, str] = {}
    for package, text in sorted(by_package.items()):
        if len(text) >= _MIN_DOCUMENT_CHARS and package != _OWN_DISTRIBUTION:
            packages.setdefault(text, package)
    return tuple((package, text) for text, package in packages.items())
