"""Jobs over small made-up tables, with the fake engine: no model, no waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchllm_operator.spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from batchllm_operator.stored_plan.run_report import RunReport
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

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
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = {**old, **value}
        fields[section] = value
    return without_model(fields)


def write_job(folder: Path, lake: Path | str = ".", **changes: Any) -> Path:
    """Write a spec of `job_fields` into a file of its name."""
    fields = job_fields(str(lake), **changes)
    path = folder / f"{fields['name']}.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def without_model(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with bytes for tokens if the engine is the fake one: tokenizers take seconds."""
    engine = fields.get("engine")
    if isinstance(engine, Mapping) and engine.get("backend") == "fake":
        extra_args = {"byte_tokens": True, **engine.get("extra_args", {})}
        fields["engine"] = {**engine, "extra_args": extra_args}
    return fields


def fake_spec(lake: Path | str, **changes: Any) -> JobSpec:
    return parse_spec(job_fields(str(lake), **changes), source="test spec")


def planned(folder: Path, rows: Sequence[Mapping[str, Any]], **changes: Any) -> StoredPlan:
    """The plan of a job over these rows; `changes` are the spec's."""
    from batchllm_operator.plan.plan_job import plan_job

    write_table(folder / "documents", rows)
    return plan_job(fake_spec(folder, **changes), DS)


def finish(plan: StoredPlan) -> RunReport:
    """Run a plan by one worker, and commit it."""
    from batchllm_operator.commit.commit_run import commit_run
    from batchllm_operator.run.run_shards import run_worker

    run_worker(plan)
    return commit_run(plan.folder.uri)


def expected_prompt(row: Mapping[str, Any]) -> str:
    """The prompt text that `job_fields` gives a row."""
    return f"Answer. {row['document']}|{row['query']}"


@dataclass(frozen=True)
class JobFolder:
    """A folder with a lake table and job specs, each of which writes a table of its name."""

    path: Path

    def write_rows(self, ds: str, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write a partition, or write it again: twelve rows unless some are given."""
        write_table(self.path / "documents", rows or document_rows(4, 3), ds)

    def write_spec(self, name: str, **changes: Any) -> str:
        """A spec, as a path; `changes` add to its sections or replace its fields."""
        fields = {"output": {"uri": f"{self.path}/{name}"}, **changes}
        return str(write_job(self.path, self.path, name=name, **fields))

    def partition(self, name: str, ds: str = DS) -> Path:
        return self.path / name / f"ds={ds}"

    def published(self, name: str, ds: str = DS) -> list[dict[str, Any]]:
        """The rows of the one file of an output partition, in the order of their keys."""
        (file,) = self.partition(name, ds).iterdir()
        return sorted(pq.ParquetFile(file).read().to_pylist(), key=lambda row: str(row["row_key"]))

    def check_published(self, name: str, ds: str = DS, num_rows: int = 12) -> None:
        """Every row of the input is there once, with a text."""
        rows = self.published(name, ds)
        (file,) = (self.path / "documents" / f"ds={ds}").iterdir()
        keys = pq.ParquetFile(file).read(["row_key"])["row_key"].to_pylist()
        assert [row["row_key"] for row in rows] == sorted(keys)
        assert len(rows) == num_rows
        assert all(row["error"] is None and row["generated_text"] for row in rows)

    def plan(self, name: str, ds: str = DS) -> Path:
        """The folder of the only plan."""
        (folder,) = (self.path / name / "_batchllm" / name / ds).glob("plan-*")
        return folder
