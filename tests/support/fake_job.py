"""Jobs over small made-up tables, with the fake engine: no model, no waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.spec import JobSpec, parse_spec

DS = "2026-01-31"


def document_rows(num_documents: int = 6, num_queries: int = 5) -> list[dict[str, Any]]:
    """Rows of several queries for each of several documents, not grouped by document."""
    return [
        {
            "row_key": f"d{document}-q{query}",
            "document": f"This is the text of document {document}. " * 4,
            "query": f"question {query}",
        }
        for query in range(num_queries)
        for document in range(num_documents)
    ]


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]], ds: str = DS) -> None:
    """Write one partition of a Parquet table."""
    partition = folder / f"ds={ds}"
    partition.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), partition / "a.parquet")


def job_fields(lake: str, **changes: Any) -> dict[str, Any]:
    """Fields of a spec with the fake engine; `changes` add to sections or replace them."""
    fields: dict[str, Any] = {
        "spec_version": 1,
        "name": "job",
        "input": {"uri": f"{lake}/documents", "key": "row_key"},
        "prompt": {"system": "Answer. ", "template": "{document}|{query}"},
        "model": {"path": "no-model"},
        "sampling": {"max_tokens": 8},
        "output": {"uri": f"{lake}/out", "carry": ["query"]},
        "engine": {"backend": "fake"},
        "planner": {"num_shards": 2, "part_rows": 5},
    }
    for section, value in changes.items():
        old = fields.get(section)
        merge = isinstance(old, Mapping) and isinstance(value, Mapping)
        fields[section] = {**old, **value} if merge else value
    return without_model(fields)


def without_model(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with bytes for tokens if the engine is the fake one: tokenizers take seconds."""
    engine = fields.get("engine")
    if isinstance(engine, Mapping) and engine.get("backend") == "fake":
        extra_args = {"byte_tokens": True, **engine.get("extra_args", {})}
        fields["engine"] = {**engine, "extra_args": extra_args}
    return fields


def fake_spec(lake: Path | str, **changes: Any) -> JobSpec:
    """A checked spec of `job_fields`."""
    return parse_spec(job_fields(str(lake), **changes), source="test spec")


def expected_prompt(row: Mapping[str, Any]) -> str:
    """The prompt text that `job_fields` gives a row."""
    return f"Answer. {row['document']}|{row['query']}"
