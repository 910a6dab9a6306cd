"""The demo's lake table: passages of real documentation, each with several queries."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.demo.documents import DemoDocument, demo_documents
from batchllm_operator.errors import TableError

_MAX_DOCUMENTS: Final = 60
_MAX_QUERIES: Final = 5
"""Of a document."""
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

    Documents are descriptions of installed distributions; their queries are the headings that recur
    most across all of them ("Installation", "Usage", ...), so that rows share documents as well as
    queries. Rows are in a fixed order that isn't grouped by document. One environment always gives
    the same bytes; an older file is replaced in one step.

    Raises:
        TableError: `ds` can't name a partition, or no installed distribution has a
            description with headings.
    """
    if not ds or "/" in ds or ds.startswith("."):
        raise TableError(f"demo table {folder}: {ds!r} can't name a partition; use 2026-01-31")
    chosen = _choose(demo_documents())
    if not chosen:
        raise TableError(
            f"demo table {folder}: no Python distribution installed here has a long description"
            " with headings, so there is nothing to make a table of"
        )
    rows = [
        {
            "snippet_id": f"{document.package}:{idx}",
            "package": document.package,
            "document": document.text,
            "query": query,
        }
        for document, queries in chosen
        for idx, query in enumerate(queries)
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
    queries = counted(len({row["query"] for row in rows}), "different query", "different queries")
    documents = counted(len(chosen), "document")
    return f"{counted(len(rows), 'row')} ({documents}, {queries}) in {partition_path}"


def _choose(documents: Sequence[DemoDocument]) -> list[tuple[DemoDocument, tuple[str, ...]]]:
    """Documents with the queries that most others share, and their queries."""
    spellings = Counter(heading for document in documents for heading in document.headings)
    recurrence = Counter(h.casefold() for document in documents for h in document.headings)
    # One spelling for all documents ("Quick Start", "Quick start"), so that queries are shared.
    canonical: dict[str, str] = {}
    for heading, _ in sorted(spellings.items(), key=lambda item: (-item[1], item[0])):
        canonical.setdefault(heading.casefold(), heading)

    by_text: dict[str, DemoDocument] = {}
    for document in documents:
        if document.headings:
            by_text.setdefault(document.text, document)
    candidates = []
    for document in by_text.values():
        ranked = sorted((-recurrence[h.casefold()], h.casefold()) for h in document.headings)
        queries = tuple(canonical[heading] for _, heading in ranked[:_MAX_QUERIES])
        num_shared = sum(count < -1 for count, _ in ranked[:_MAX_QUERIES])
        candidates.append((-num_shared, document.package, document, queries))
    candidates.sort(key=lambda candidate: candidate[:2])
    return [(document, queries) for _, _, document, queries in candidates[:_MAX_DOCUMENTS]]
