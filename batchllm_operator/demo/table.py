"""The demo's lake table: passages of real documentation, each with several queries."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.demo.documents import demo_documents
from batchllm_operator.errors import TableError

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
