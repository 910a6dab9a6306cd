"""Plans made on Spark: complete, as good as local plans, and the same whatever happens to tasks."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from lake.test_delta_features import write_mapped
from support.fake_job import DS, document_rows, fake_spec, finish, write_table
from support.prompts_job import PROMPTS, asks_of, several
from support.spark_jobs import planned_rows, rows_of_shards

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.errors import (
    BatchLLMError,
    EmptyPartitionError,
    FailedRowsError,
    Interrupted,
    KeyColumnError,
    PlanError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.plan.given import find_given
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.spark import plan_job as stage
from batchllm_operator.spark import ranges, reading, session
from batchllm_operator.spark.plan_job import plan_on_spark
from batchllm_operator.spark.staging import Staging
from batchllm_operator.spark.tasks import (
    SparkJobError,
    named_failures,
    reported,
    reports_of,
    rows_of,
    tasks,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")
NUM_ROWS = 120


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranges, and a task for each row group, of a table of some kilobytes."""
    monkeypatch.setattr(ranges, "RANGE_BYTES", 12_000)
    monkeypatch.setattr(reading, "PART_BYTES", 500)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    write_rows(tmp_path, document_rows(12, 10))
    return tmp_path


def write_rows(lake: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A table of two files, of several row groups each."""
    folder = lake / "documents" / f"ds={DS}"
    folder.mkdir(parents=True, exist_ok=True)
    half = len(rows) // 2 + 1
    for name, some in (("a", rows[:half]), ("b", rows[half:])):
        pq.write_table(pa.Table.from_pylist(some), folder / f"{name}.parquet", row_group_size=25)


def job(lake: Path, **changes: Any) -> JobSpec:
    return fake_spec(lake, **{"planner": {"num_shards": None}, **changes})


def test_a_plan_is_as_good_as_a_local_one(lake: Path, small_ranges: None) -> None:
    local, plan = plan_job(job(lake), DS), plan_on_spark(job(lake), DS)
    assert planned_rows(plan) == Counter(range(NUM_ROWS))
    assert len(plan.manifest.shards) > 2
    assert len(plan.manifest.row_parts) > 2
    found, wanted = plan.manifest.counts, local.manifest.counts
    for name in ("num_rows", "num_requests", "num_duplicate_rows", "num_logical_tokens"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.num_optimal_tokens == wanted.num_optimal_tokens
    # Only what a cut between ranges makes two engines compute: at most one document each.
    lost = found.num_planned_tokens - wanted.num_planned_tokens
    assert lost <= (len(plan.manifest.shards) - 1) * 200
    assert plan.manifest.sharing is not None
    assert local.manifest.sharing is not None
    degrees = plan.manifest.sharing.share_degrees
    assert sum(degrees.counts) == sum(local.manifest.sharing.share_degrees.counts)


def test_its_counts_are_a_local_plans(lake: Path, small_ranges: None) -> None:
    """Of rows that are cut, and of a partition that isn't there."""
    cut = {"prompt": {"truncate": {"document": "middle"}}, "engine": {"max_model_len": 140}}
    for spec, ds in ((job(lake, **cut), DS), (job(lake, on_empty="commit"), "2026-02-01")):
        local, counts = (make(spec, ds).manifest.counts for make in (plan_job, plan_on_spark))
        for name in ("num_rows", "num_truncated_rows", "num_rejected_rows", "num_requests"):
            assert getattr(counts, name) == getattr(local, name), name
        assert counts.num_logical_tokens == local.num_logical_tokens
        assert counts.num_truncated_rows == counts.num_rows


def test_prompts_of_one_row_are_planned_together(lake: Path, small_ranges: None) -> None:
    few = {"template": "{document}\n{query}", "when": "query == 'question 1'"}
    same = {"template": "{document}\n\nSummarise:", "sampling": {"max_tokens": 4}}
    planner = {"num_shards": None}
    spec = several(lake, {**PROMPTS, "few": few, "same": same}, planner=planner)
    local, plan = plan_job(spec, DS), plan_on_spark(spec, DS)
    assert len(plan.manifest.shards) > 2
    assert planned_rows(plan) == planned_rows(local)
    asked = [
        {(bytes(ids), ask % 5) for ids, asks in asks_of(each) for ask in asks}
        for each in (local, plan)
    ]
    assert asked[0] == asked[1]
    assert all(len({ask % 5 for ask in asks}) == 1 for _, asks in asks_of(plan))
    found, counts = plan.manifest.counts, local.manifest.counts
    for name in ("num_rows", "num_unasked_rows", "num_rejected_rows", "num_logical_tokens"):
        assert getattr(found, name) == getattr(counts, name), name
    # A range may end between rows of one prompt.
    extra = found.num_optimal_tokens - counts.num_optimal_tokens
    assert 0 <= extra <= 16 * len(plan.manifest.shards)
    for name, prompt in plan.manifest.counts_by_prompt.items():
        of_local = local.manifest.counts_by_prompt[name]
        assert prompt.num_logical_tokens == of_local.num_logical_tokens
        assert of_local.num_alone_tokens <= prompt.num_alone_tokens <= prompt.num_logical_tokens
    finish(plan)
    with pytest.raises(PlanError, match=r"without it, --only can't tell .*: leave it out"):
        plan_job(spec, DS, ["few"])
    with pytest.raises(SpecError, match="prompts: those that need answers to others aren't for pl"):
        plan_on_spark(several(lake, {"a": same, "b": {"template": "{a}"}}), DS)


def test_planning_again_gives_the_same_bytes(lake: Path, small_ranges: None) -> None:
    first = plan_on_spark(job(lake), DS)
    written = {name: first.folder.read_bytes(name) for name in first.manifest.files}
    again = plan_on_spark(job(lake), DS)
    assert again.manifest == first.manifest
    assert {name: again.folder.read_bytes(name) for name in written} == written
    (folder,) = (lake / "out" / "_batchllm" / "job" / DS).iterdir()  # nothing staged is left
    assert folder.name == f"plan-{first.manifest.plan_id}"


def test_a_prompt_of_half_of_the_rows_is_cut_by_row(tmp_path: Path, small_ranges: None) -> None:
    rows = document_rows(12, 10)
    for row in rows[::2]:
        row |= {"document": "The same. " * 20, "query": "the same"}
    write_rows(tmp_path, rows)
    sampled = {"sampling": {"temperature": 1.0, "max_tokens": 8}}
    for changes in ({}, sampled):
        plan = plan_on_spark(job(tmp_path, **changes), DS)
        assert planned_rows(plan) == Counter(range(NUM_ROWS))
        equal = range(0, NUM_ROWS, 2)
        num_shards = sum(not set(equal).isdisjoint(rows) for rows in rows_of_shards(plan))
        assert num_shards > 2


def test_the_number_of_shards_is_the_specs(lake: Path, small_ranges: None) -> None:
    plan = plan_on_spark(job(lake, planner={"num_shards": 7}), DS)
    assert len(plan.manifest.shards) == 7
    assert planned_rows(plan) == Counter(range(NUM_ROWS))
    assert plan.manifest.imbalance < 2


def rows_with(name: str, kind: pa.DataType, values: dict[int, Any]) -> pa.Table:
    """The rows with a column of numbers, some of which have other values."""
    column = pa.array([values.get(idx, idx) for idx in range(NUM_ROWS)], kind)
    return pa.Table.from_pylist(document_rows(12, 10)).append_column(name, column)


def rows_without_text(name: str, *idxs: int, value: bytes | None) -> pa.Table:
    """The rows, some of which have a null or broken text in a column."""
    rows = pa.Table.from_pylist(document_rows(12, 10))
    texts = [value if n in idxs else x.encode() for n, x in enumerate(rows[name].to_pylist())]
    column = pa.array(texts).cast(pa.string(), safe=False)
    return rows.set_column(rows.schema.get_field_index(name), name, column)


AT = {"carry": ["at"]}


@pytest.mark.parametrize(
    ("rows", "changes", "kind", "message"),
    [
        (
            rows_with("id", pa.int64(), {3: 3, 40: 3, 77: None, 119: None}),
            {"input": {"key": "id"}},
            KeyColumnError,
            "null in 2 rows, such as row 77, 119",
        ),
        (
            rows_with("id", pa.int64(), {3: 5, 40: 6, 77: 5, 119: 6}),
            {"input": {"key": "id"}},
            KeyColumnError,
            "isn't unique, as it repeats 5, 6",
        ),
        (
            rows_without_text("query", 3, 50, 110, value=None),
            {"max_failed_fraction": 0.02},
            FailedRowsError,
            "3 of 120 rows failed, 2.5 % (3 null",
        ),
        (rows_without_text("row_key", 77, value=b"\xff"), {}, KeyColumnError, "UTF-8 in row 77"),
        (rows_without_text("query", 77, value=b"\xff"), {}, TableError, "UTF-8 in row 77"),
        (
            rows_with("at", pa.timestamp("ns"), {idx: int(idx == 77) for idx in range(NUM_ROWS)}),
            {"output": AT},
            TableError,
            "'at' has a value that doesn't fit the table's type timestamp[us] in row 77",
        ),
    ],
    ids=["null keys", "repeated keys", "failed rows", "broken key", "broken text", "values"],
)
def test_rows_are_refused_in_the_words_of_a_local_plan(
    tmp_path: Path,
    small_ranges: None,
    rows: pa.Table,
    changes: dict[str, Any],
    kind: type[BatchLLMError],
    message: str,
) -> None:
    folder = tmp_path / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    pq.write_table(rows, folder / "a.parquet", row_group_size=25)
    if changes.get("output") == AT:
        changes = {"output": {"uri": f"delta+{tmp_path}/delta", **AT}}
    refusals = []
    for make in (plan_job, plan_on_spark):
        with pytest.raises(BatchLLMError) as refused:
            make(job(tmp_path, **changes), DS)
        refusals.append((type(refused.value), str(refused.value)))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is kind
    assert message in refusals[0][1]
    assert not list(tmp_path.rglob("manifest.json")) and not list(tmp_path.rglob("staged-*/*"))


def test_a_partition_without_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, document_rows(2, 2))
    nothing = {"filter": [{"column": "query", "op": "==", "value": "none"}]}
    with pytest.raises(EmptyPartitionError, match="has no rows that meet"):
        plan_on_spark(job(tmp_path, input=nothing), DS)
    plan = plan_on_spark(job(tmp_path, input=nothing, on_empty="commit"), DS)
    assert plan.manifest.shards == ()
    commit_run(plan.folder.uri)
    assert pq.read_table(tmp_path / "out" / f"ds={DS}" / "data.parquet").num_rows == 0


def test_a_partition_that_spark_wont_commit(
    lake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage, "MOST_ROWS_OF_ONE_FILE", NUM_ROWS - 1)
    plan_on_spark(job(lake), DS)
    assert "Spark won't commit one of 120 rows; give the job an Iceberg" in caplog.text
    with pytest.raises(SpecError, match="reuse_outputs"):
        plan_on_spark(job(lake, reuse_outputs=True), DS)


def test_a_table_that_changes_meanwhile_isnt_planned(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ranges = stage.plan_ranges

    def then_change(*args: Any) -> Any:
        found = plan_ranges(*args)
        write_table(lake / "documents", document_rows(3, 3))
        return found

    monkeypatch.setattr(stage, "plan_ranges", then_change)
    with pytest.raises(StorageError, match="changed while it was read"):
        plan_on_spark(job(lake), DS)
    assert not list((lake / "out").rglob("*.parquet"))


def test_tasks_see_the_drivers_variables_for_the_lake(
    lake: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the session has been given win, and none stays."""

    def seen(names: list[str]) -> Iterator[Any]:
        import os

        yield reported(*map(os.environ.get, names))

    environment = spark.sparkContext.environment
    monkeypatch.setitem(environment, "AWS_DEFAULT_REGION", "of-the-session")
    before = dict(environment)
    names = ["AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "PYICEBERG_CATALOG__A__URI", "OTHER"]
    for name in names:
        monkeypatch.setenv(name, f"driver's {name}")
    with session.spark_session(fake_spec(lake)) as active:
        found = reports_of(tasks(active, [names], list[str], seen), str | None)
    wanted = ["driver's AWS_ENDPOINT_URL", "of-the-session", "driver's PYICEBERG_CATALOG__A__URI"]
    assert found == [*wanted, None]
    assert environment == before


def test_executors_with_another_release_are_refused(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "__version__", "9.9")
    with pytest.raises(SpecError, match=r"executors lack batchllm_operator 9\.9, .*: 0\."):
        plan_on_spark(job(lake), DS)
    monkeypatch.setattr(session, "_LEAST_SPARK", (99, 1))
    with pytest.raises(SpecError, match=r"needs Spark 99\.1 or later, and the session has 4\."):
        plan_on_spark(job(lake), DS)


@pytest.mark.parametrize("where", ["draw_sample", "plan_ranges"])
def test_wrong_ids_of_the_fast_tokenizer(
    spark: SparkSession,
    lake: Path,
    small_ranges: None,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """A task has found them: planning starts again, without it."""
    tried = []
    work = getattr(stage, where)

    def first_differ(*args: Any) -> Any:
        is_exact = (args[1].reading if where == "plan_ranges" else args[1]).is_exact
        tried.append(is_exact)
        if not is_exact:

            def differ(_: int) -> Iterator[Any]:
                raise TokenIdsDifferError("a sample's token ids differ")

            rows_of(tasks(spark, [0], int, differ))
        return work(*args)

    monkeypatch.setattr(stage, where, first_differ)
    plan = plan_on_spark(job(lake), DS)
    assert tried == [False, True]
    assert planned_rows(plan) == Counter(range(NUM_ROWS))


def test_no_task_writes_once_the_driver_has_stopped(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    staging = Staging.beside(job(lake), DS)
    staging.open(spark)
    file = next((lake / "documents").rglob("*.parquet"))
    assert staging.publish(file, "rows", 1).name.startswith("rows-")
    staging.close()
    with pytest.raises(StorageError, match="the driver has stopped"):
        staging.publish(file, "rows", 1)
    staging.remove()
    assert not Folder.open(staging.uri).exists()


def test_errors_of_tasks(spark: SparkSession) -> None:
    def refuse(_: int) -> Iterator[Any]:
        raise KeyColumnError("key 'ä' is:\n[\"odd\"]")

    def fail(_: int) -> Iterator[Any]:
        yield 1 // len([])

    with pytest.raises(KeyColumnError) as refused:
        rows_of(tasks(spark, [0], int, refuse))
    assert str(refused.value) == "key 'ä' is:\n[\"odd\"]"
    with pytest.raises(SparkJobError, match=r"ZeroDivisionError: integer division or modulo"):
        rows_of(tasks(spark, [0], int, fail))


def test_a_machine_without_java_that_is_new_enough_is_refused(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SpecError, match=r"Java 17 or later, and there is no .*/bin/java; install"):
        session._start(fake_spec(lake))
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    with pytest.raises(SpecError, match=r"and .*/bin/java says 'openjdk version \"11\.0\.2\""):
        session._start(fake_spec(lake))


def test_a_stop_is_no_failure_of_spark() -> None:
    """Even if pyspark has met an error because of it."""
    with pytest.raises(Interrupted), named_failures("Spark's job failed"):
        try:
            raise Interrupted(15)
        except Interrupted:
            raise ConnectionError("Answer from Java side is empty") from None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_waits_until_java_has_started(
    lake: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Then the new session is ended."""
    seen: list[str] = []
    main = threading.get_ident()

    def start(spec: JobSpec) -> tuple[Any, bool]:
        time.sleep(0.2)  # a signal on the main thread's way into its wait is seen after that
        signal.pthread_kill(main, number)
        give_up_at = time.monotonic() + 10
        while not seen and time.monotonic() < give_up_at:
            time.sleep(0.01)
        seen.append("started")
        return SimpleNamespace(stop=lambda: seen.append("stopped")), True

    def stop(number: int, frame: object) -> None:
        seen.append("a signal")
        raise Interrupted(number)

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(Interrupted), session.spark_session(job(lake)):
            pass
    finally:
        signal.signal(number, before)
    assert seen == ["a signal", "started", "stopped"]


def test_a_part_has_many_small_files_or_some_row_groups_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is in one part, in the order of the rows."""
    folder = tmp_path / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    rows = pa.Table.from_pylist(document_rows(10, 100))
    for idx in range(600):
        pq.write_table(rows.slice(idx, 1), folder / f"a{idx:04}.parquet")
    pq.write_table(rows.slice(600), folder / "b.parquet", row_group_size=50)
    size = (folder / "b.parquet").stat().st_size
    monkeypatch.setattr(reading, "PART_BYTES", size // 2)
    monkeypatch.setattr(reading, "_OPENING_BYTES", size // 200)
    given = find_given(job(tmp_path), DS)
    parts = reading.parts_of(given.table, given.snapshot)
    assert [part.number for part in parts] == list(range(len(parts)))
    num_pieces = [len(part.pieces) for part in parts]
    assert min(num_pieces[0], num_pieces[1]) > 1
    assert [part.pieces[-1].row_groups for part in parts][-1] is not None
    of_task = reading.Reading.of(given)
    keys = [
        key
        for part in parts
        for batch in of_task.scan(part, ["row_key"])
        for key in batch.column(0).to_pylist()
    ]
    assert keys == rows["row_key"].to_pylist()
    assert len(list(of_task.scan(parts[0], ["row_key"]))) == 1  # joined


def test_rows_of_mapped_columns_and_without_deleted_rows(
    tmp_path: Path, small_ranges: None
) -> None:
    write_mapped(Folder.open(f"{tmp_path}/in"), "id")
    keys = [{"column": "key", "op": "<=", "value": 3}]
    source = {"uri": f"{tmp_path}/in", "key": "key", "partition_column": "day", "filter": keys}
    output = {"uri": f"delta+{tmp_path}/out", "carry": ["doc", "ds"]}
    prompt = {"template": "{doc.title} {again}"}
    spec = job(tmp_path, input=source, output=output, prompt=prompt, max_failed_fraction=1.0)
    local, plan = plan_job(spec, DS), plan_on_spark(spec, DS)
    assert plan_job(spec, DS).manifest == local.manifest
    for name in ("num_rows", "num_rejected_rows", "num_logical_tokens"):
        found = getattr(plan.manifest.counts, name)
        assert found == getattr(local.manifest.counts, name) > 0, name
    finish(plan)
    found = DeltaTable(f"{tmp_path}/out")
    assert "columnMapping" not in found.schema().to_json()
    rows = found.to_pyarrow_table().sort_by("key").to_pylist()
    assert [(row["key"], row["status"] == "rejected") for row in rows] == [(1, False), (3, True)]
    assert [row["doc"]["raw"] for row in rows] == [b"x", b"y"]
