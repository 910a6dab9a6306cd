"""Commits on Spark publish what local ones do, by one commit of the table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.fake_job import DS, document_rows, fake_spec, write_table
from support.lake_tables import LAKES
from support.prompts_job import PROMPTS, several

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import IncompleteRunError, PlanError, StorageError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.spark import commit_run as commit
from batchllm_operator.spark import ranges, reading
from batchllm_operator.spark.commit_run import commit_on_spark
from batchllm_operator.spark.plan_job import plan_on_spark
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MakeSpec = Callable[..., JobSpec]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranges in a table of a hundred rows."""
    monkeypatch.setattr(commit, "_rows_each", lambda *_: 32)
    monkeypatch.setattr(commit, "BUCKET_ROWS", 16)
    monkeypatch.setattr(ranges, "RANGE_BYTES", 12_000)
    monkeypatch.setattr(reading, "PART_BYTES", 500)


@pytest.fixture(params=["delta", "iceberg"])
def make_spec(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spark: SparkSession,
) -> MakeSpec:
    """Makes the spec of a job with an output table of its own, which isn't there yet."""

    def make(name: str, **changes: Any) -> JobSpec:
        folder = tmp_path / name
        folder.mkdir()
        lake = LAKES[request.param](str(folder), tmp_path, monkeypatch, name)
        for variable, value in os.environ.items():  # tasks read it, too
            if variable.startswith("PYICEBERG_"):
                spark.sparkContext.environment[variable] = value
        output = {"uri": lake.address, "staging_uri": str(folder / "staging")}
        planner = {"num_shards": None}
        make_job = several if "prompts" in changes else fake_spec
        return make_job(tmp_path, **{"output": output, "planner": planner, **changes})

    return make


def write_messy_rows(lake: Path) -> list[dict[str, Any]]:
    rows = document_rows(12, 10)
    rows[7]["document"] = None
    for row in rows[64:96]:  # a range without any output
        row["document"] = None
    rows[40] |= {"document": rows[3]["document"], "query": rows[3]["query"]}
    rows[5]["query"] = None
    write_table(lake / "documents", rows)
    return rows


def finished(spec: JobSpec, make: Callable[[JobSpec, str], StoredPlan] = plan_job) -> StoredPlan:
    plan = make(spec, DS)
    run_worker(plan)
    return plan


def published(spec: JobSpec) -> list[dict[str, Any]]:
    """The partition's rows in their order, without `run_id` and `num_cached_tokens`."""
    table = open_table(spec.output.uri, spec.input.partition_column)
    snapshot = table.snapshot(DS)
    names = [n for n in snapshot.schema.names if n not in ("run_id", "num_cached_tokens")]
    rows: list[dict[str, Any]] = pa.Table.from_batches(table.scan(snapshot, names)).to_pylist()
    for row in rows:
        for name in spec.prompts:
            del row[name]["num_cached_tokens"]
    return rows


LABELS = {"yes": "y", "no": "n"}
ASKED = {
    "few": {"template": "{document}\n{query}", "when": "query == 'question 1'"},
    "label": {
        "template": "{document}?",
        "task": "classify",
        "labels": LABELS,
        "calibrate": "prior",
    },
}


@pytest.mark.parametrize("changes", [{}, {"prompts": {**PROMPTS, **ASKED}}])
def test_the_same_rows_as_a_local_commit(
    tmp_path: Path, make_spec: MakeSpec, changes: dict[str, Any]
) -> None:
    """From a local plan and from one of Spark; twice."""
    rows = write_messy_rows(tmp_path)
    allow = {"max_failed_fraction": 0.5, **changes}
    local = make_spec("local", **allow)
    in_one_process = commit_run(finished(local).folder.uri)
    wanted = published(local)
    assert [row["row_key"] for row in wanted] == [row["row_key"] for row in rows]
    for name, make in (("of_local", plan_job), ("of_spark", plan_on_spark)):
        spec = make_spec(name, **allow)
        plan = finished(spec, make)
        report = commit_on_spark(plan.folder.uri)
        assert published(spec) == wanted
        assert report.plan.num_rows == 120 * len(spec.questions)
        assert report.num_failed_rows == in_one_process.num_failed_rows >= 34
        assert commit_on_spark(plan.folder.uri) == report == commit_run(plan.folder.uri)
        assert published(spec) == wanted


def test_unfinished_shards_and_missing_outputs(tmp_path: Path, make_spec: MakeSpec) -> None:
    write_table(tmp_path / "documents", document_rows(12, 10))
    spec = make_spec("table")
    plan = plan_job(spec, DS)
    with pytest.raises(IncompleteRunError):
        commit_on_spark(plan.folder.uri)
    run_worker(plan)
    cut = commit._cut

    def without_one(sources: Any) -> Any:
        """As if the parts of the first shard had lost a ledger entry after the check."""
        sources[0].entries.pop()
        return cut(sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_cut", without_one)
        with pytest.raises(PlanError, match=r"row .* has 0 outputs where the plan wants 1"):
            commit_on_spark(plan.folder.uri)
    assert published_is_empty(spec)
    commit_on_spark(plan.folder.uri)
    assert len(published(spec)) == 120


def published_is_empty(spec: JobSpec) -> bool:
    table = open_table(spec.output.uri, spec.input.partition_column)
    return table.published(DS) is None


def test_columns_that_change_meanwhile(
    tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were written for other columns aren't committed."""
    write_table(tmp_path / "documents", document_rows(12, 10))
    spec = make_spec("table")
    plan = finished(spec)
    write = commit._write

    def then_change(*args: Any) -> Any:
        staged: Any = write(*args)
        columns = staged.staging.file_schema
        columns = columns.set(0, columns.field(0).with_type(pa.int64()))
        staging = dataclasses.replace(staged.staging, file_schema=columns)
        return dataclasses.replace(staged, staging=staging)

    monkeypatch.setattr(commit, "_write", then_change)
    with pytest.raises(StorageError, match="has changed while the outputs were written"):
        commit_on_spark(plan.folder.uri)
    assert published_is_empty(spec)


def test_plain_parquet_is_written_by_the_driver(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "documents", document_rows(4, 3))
    plan = finished(fake_spec(tmp_path))
    monkeypatch.setattr(commit, "MOST_ROWS_OF_ONE_FILE", 11)
    with pytest.raises(TableError, match="too many for one; give the job an Iceberg or Delta"):
        commit_on_spark(plan.folder.uri)
    monkeypatch.setattr(commit, "MOST_ROWS_OF_ONE_FILE", 12)
    commit_on_spark(plan.folder.uri)
    assert len(published(fake_spec(tmp_path))) == 12


def test_rows_at_fault_are_quarantined_by_the_driver(
    tmp_path: Path, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "documents", document_rows(12, 10))
    bound = {"generated_text": {"matches": {"[0-9]$": {"min": 1}}}}
    allow = {"max_failed_fraction": 1.0, "on_unmet": "quarantine"}
    spec = make_spec("table", expect=bound, **allow)
    plan = finished(spec, plan_on_spark)
    assert "expect: one process, the driver's, joins and measures all 120 rows" in caplog.text
    report = commit_on_spark(plan.folder.uri)
    texts = [row["generated_text"] for row in published(spec)]
    assert all(text[-1].isdecimal() for text in texts)
    assert len(texts) + report.num_quarantined_rows == 120 > len(texts)
