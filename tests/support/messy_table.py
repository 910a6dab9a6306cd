"""A small table of rows as people write them, for models with real weights."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MESSY = Path(__file__).with_name("messy_documents.json")
_QUERIES = ("Is the writer content?", "What is it about?", "Which language is it in?")


def messy_rows() -> list[dict[str, Any]]:
    """Each document under each query, not grouped by document; rows that are alike, empty, null."""
    documents = json.loads(MESSY.read_text(encoding="utf-8"))
    rows: list[tuple[Any, Any]] = [
        (document, query) for query in _QUERIES for document in documents
    ]
    rows += [rows[4], ("", _QUERIES[0]), (None, _QUERIES[1]), ("x", " \n"), (documents[0], None)]
    return [
        {"snippet_id": f"{idx * 7 % 32:02}é", "document": document, "query": query}
        for idx, (document, query) in enumerate(rows)
    ]


def answerable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those without a null, in the table's order."""
    return [row for row in rows if None not in row.values()]


def write_messy_table(folder: Path, ds: str) -> None:
    (folder / f"ds={ds}").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(messy_rows()), folder / f"ds={ds}" / "rows.parquet")
