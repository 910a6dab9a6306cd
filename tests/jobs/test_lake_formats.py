"""A whole job from and to a table of each format."""

import datetime
import io
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, expected_prompt, fake_spec
from support.lake_tables import Lake, open_lake

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.commit.commit_run import commit_run, published_plan_uri
from batchllm_operator.commit.partition import write_partition
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import (
    ConflictError,
    EmptyPartitionError,
    PlanError,
    SpecError,
    TableError,
)
from batchllm_operator.inspect.gc import find_garbage, remove_garbage
from batchllm_operator.lake import Publication
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.job_status import read_status
from batchllm_operator.spec import FilterTerm, JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher


def spec_of(lakes: tuple[Lake, Lake], **output: Any) -> JobSpec:
    source, target = lakes
    return fake_spec(
        "unused",
        input={"uri": source.address, "key": ["row_key", "number"]},
        output={"uri": target.address, "staging_uri": target.staging, **output},
        planner={"estimated_output_tokens": {"learned": True}},
    )


def run_job(spec: JobSpec, ds: str = DS) -> StoredPlan:
    plan = plan_job(spec, ds)
    run_worker(plan)
    return plan


def input_rows(num_documents: int = 6, num_queries: int = 5) -> list[dict[str, Any]]:
    extra = {
        "price": Decimal("1.50"),
        "tags": ["a", None],
        "origin": {"site": "x", "at": datetime.datetime(2026, 1, 1)},
    }
    rows = document_rows(num_documents, num_queries)
    return [{**row, "number": number, **extra} for number, row in enumerate(rows)]


CARRY = ["query", "price", "tags", "origin", "color"]


def append(lake: Lake, rows: list[dict[str, Any]], ds: str = DS) -> None:
    color = pa.array(["red"] * len(rows)).dictionary_encode()
    lake.append(ds, pa.Table.from_pylist(rows).append_column("color", color))


def read(lake: Lake, columns: list[str], ds: str = DS) -> list[dict[str, Any]]:
    table = open_lake(lake)
    batches = table.scan(table.snapshot(ds), columns)
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_job_runs_from_table_to_table(lakes: tuple[Lake, Lake]) -> None:
    rows = input_rows()
    append(lakes[0], rows)
    spec = spec_of(lakes, carry=CARRY)
    plan = run_job(spec)
    manifest = plan.manifest
    assert manifest.input_version == open_lake(lakes[0]).snapshot(DS).version
    assert plan.folder.uri.startswith(f"{lakes[1].staging}/_batchllm/job/{DS}/")
    report = commit_run(plan.folder.uri)
    assert (report.num_rows_out, len(report.sample_rows)) == (30, 3)

    columns = ["row_key", "number", "generated_text", "run_id", "ds", *CARRY]
    found = read(lakes[1], columns)
    for row, given in zip(found, rows, strict=True):
        text = fake_text(list(expected_prompt(given).encode()))
        own = {"generated_text": text, "ds": DS, "run_id": plan.publication.run_id, "color": "red"}
        assert row == {name: own.get(name, given.get(name)) for name in columns}
    assert published_plan_uri(spec, DS) == plan.folder.uri
    assert load_report(plan.folder.uri) == report

    version = open_lake(lakes[1]).snapshot(DS).version
    assert report.lineage is not None
    read_from, written = report.lineage.input, report.lineage.output
    assert (read_from.version, written.version) == (manifest.input_version, version)
    assert (read_from.num_rows, written.num_rows) == (30, 30)
    assert read_from.columns["price"] == written.columns["price"]
    assert report.lineage.kept["origin"] == "origin"
    assert report.lineage.answers["generated_text"] == ("document", "query")
    assert commit_run(plan.folder.uri) == report
    assert open_lake(lakes[1]).snapshot(DS).version == version


def test_two_workers_share_a_job_whose_parts_gc_removes(lakes: tuple[Lake, Lake]) -> None:
    append(lakes[0], input_rows())
    spec = spec_of(lakes)
    plan = plan_job(spec, DS)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda owner: run_worker(plan, owner=owner), ("a", "b")))
    attempts = [name for name in plan.folder.find() if name.endswith("claim.json")]
    assert len(attempts) == 2
    assert {shard.state for shard in read_status(plan).shards} == {"finished"}
    commit_run(plan.folder.uri)
    assert len(read(lakes[1], ["row_key"])) == 30
    garbage, _ = find_garbage(spec, before=time.time() + 86_400)
    remove_garbage(garbage)
    left = set(plan.folder.find())
    assert {"manifest.json", "committed.json"} <= left
    assert not any(name.startswith(("runs/", "shard-")) for name in left)


def test_a_changed_input_replaces_the_partition_and_teaches_the_next(
    lakes: tuple[Lake, Lake],
) -> None:
    append(lakes[0], input_rows())
    spec = spec_of(lakes, carry=["query"])
    first = run_job(spec)
    commit_run(first.folder.uri)
    append(lakes[0], [{**row, "row_key": f"x-{row['row_key']}"} for row in input_rows(2, 2)])
    second = run_job(spec)
    assert second.folder != first.folder
    commit_run(second.folder.uri)
    assert len(read(lakes[1], ["row_key"])) == 34
    assert check_publisher(open_lake(lakes[1]), spec, DS) == second.publication

    append(lakes[0], input_rows(), "2026-02-01")
    learned = plan_job(spec, "2026-02-01").manifest.learned
    assert learned is not None
    assert (learned.ds, learned.plan_id, learned.num_rows) == (DS, second.manifest.plan_id, 34)
    assert learned.num_known_prefixes > 0


def commit_in_between(monkeypatch: pytest.MonkeyPatch, slow: StoredPlan, fast: StoredPlan) -> None:
    """Commits `fast` once the data files of `slow` are written."""

    def overtaken(plan: StoredPlan, *args: Any) -> Path:
        data = write_partition(plan, *args)
        if plan == slow:
            commit_run(fast.folder.uri)
        return data

    monkeypatch.setattr("batchllm_operator.commit.commit_run.write_partition", overtaken)


def test_a_commit_that_somebody_else_got_ahead_of(
    lakes: tuple[Lake, Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plans for one partition, committed at the same time: one wins, the other is told."""
    append(lakes[0], input_rows())
    slow = run_job(spec_of(lakes))
    append(lakes[0], [{**row, "row_key": f"x-{row['row_key']}"} for row in input_rows(2, 2)])
    fast = run_job(spec_of(lakes))

    commit_in_between(monkeypatch, slow, fast)
    with pytest.raises(ConflictError, match=fast.manifest.plan_id):
        commit_run(slow.folder.uri)
    with pytest.raises(PlanError, match="a later plan's outputs"):  # a retry doesn't win, either
        commit_run(slow.folder.uri)
    assert len(read(lakes[1], ["row_key"])) == 34


def test_a_newer_plan_wins_whenever_the_older_one_publishes(
    lakes: tuple[Lake, Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one was past its own check when it was marked: its rows are replaced at once."""
    append(lakes[0], input_rows())
    older = run_job(spec_of(lakes))
    append(lakes[0], [{**row, "row_key": f"x-{row['row_key']}"} for row in input_rows(2, 2)])
    newer = run_job(spec_of(lakes))
    mark = StoredPlan.mark_older_plans

    def late(plan: StoredPlan, seen: Publication | None) -> None:
        if plan == newer:
            commit_run(older.folder.uri)
        mark(plan, seen)

    monkeypatch.setattr(StoredPlan, "mark_older_plans", late)
    commit_run(newer.folder.uri)
    assert len(read(lakes[1], ["row_key"])) == 34
    assert check_publisher(open_lake(lakes[1]), newer.manifest.spec, DS) == newer.publication
    with pytest.raises(PlanError, match="a later plan's outputs"):
        commit_run(older.folder.uri)


def test_an_older_plan_does_not_fill_what_a_newer_one_has_emptied(
    lakes: tuple[Lake, Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition without rows looks as it did before anybody wrote it."""
    append(lakes[0], input_rows(), "2026-01-01")
    append(lakes[0], input_rows())
    spec = spec_of(lakes).model_copy(update={"on_empty": "commit"})
    older = run_job(spec)
    no_row = FilterTerm(column="row_key", value="nobody's")
    source = spec.input.model_copy(update={"filter": (no_row,)})
    newer = run_job(spec.model_copy(update={"input": source}))
    assert newer.manifest.counts.num_rows == 0

    commit_in_between(monkeypatch, older, newer)
    with pytest.raises(ConflictError, match=newer.manifest.plan_id):
        commit_run(older.folder.uri)
    again = commit_run(newer.folder.uri)
    assert (again.plan.num_rows, again.sample_rows) == (0, ())
    assert read(lakes[1], ["row_key"]) == []


def test_more_carried_columns_need_leave(lakes: tuple[Lake, Lake]) -> None:
    append(lakes[0], input_rows(), "2026-01-01")
    append(lakes[0], input_rows())
    commit_run(run_job(spec_of(lakes), "2026-01-01").folder.uri)
    with pytest.raises(TableError, match=r"'price'.*output\.add_columns"):
        plan_job(spec_of(lakes, carry=["price"]), DS)
    commit_run(run_job(spec_of(lakes, carry=["price"], add_columns=True)).folder.uri)
    assert read(lakes[1], ["price"])[0] == {"price": Decimal("1.50")}


@pytest.mark.parametrize(
    ("names", "ds", "nearest"),
    [
        (["2026-01-31T04", "2026-01-31T05"], "2026-01-31", "'2026-01-31T04', '2026-01-31T05'"),
        (["20260130", "20260131"], "2026-01-31", "'20260131'"),
        (["blue", "green"], "2026-01-31", "'blue'"),
        (["2026-01-30", "2026-01-31"], "2026-01-31T00:00:00", "'2026-01-31'"),
        (["2026-01-30", "2026-01-31"], "eu|2026-01-31", "'2026-01-31'"),
    ],
)
def test_a_partition_of_another_form_is_shown_with_the_nearest(
    lakes: tuple[Lake, Lake], names: list[str], ds: str, nearest: str
) -> None:
    for name in names:
        append(lakes[0], input_rows(1, 1), name)
    with pytest.raises(EmptyPartitionError) as refused:
        plan_job(spec_of(lakes), ds)
    assert (
        f"Column 'ds' holds string in another form than {ds!r}; the nearest are: {nearest}; name"
        f" one with --ds or, in Airflow, with the task group's argument ds, such as"
        " ds=\"{{ logical_date.strftime('%Y-%m-%d') }}\""
    ) in str(refused.value)


def break_text(lake: Lake, column: str) -> None:
    """Make the second of two texts in the only file with the column no UTF-8."""
    files = {name: lake.folder.read_bytes(name) for name in lake.data_files()}
    tables = {name: pq.read_table(pa.BufferReader(file)) for name, file in files.items()}
    [(name, table)] = ((n, each) for n, each in tables.items() if column in each.column_names)
    broken = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xff\xfe")
    )
    place = table.schema.get_field_index(column)
    kind = table.schema.field(column).with_type(pa.string())
    sink = io.BytesIO()
    pq.write_table(table.set_column(place, kind, broken), sink)
    lake.folder.write_bytes(name, sink.getvalue())


@pytest.mark.parametrize("column", ["row_key", "query", "document"])
def test_text_that_is_not_utf8(lakes: tuple[Lake, Lake], column: str) -> None:
    """It costs its row in a prompt, and is refused where readers of the output would meet it."""
    append(lakes[0], [{**row, "number": n} for n, row in enumerate(input_rows(2, 1))])
    break_text(lakes[0], column)
    spec = spec_of(lakes, carry=["query"] if column == "query" else [])
    if column == "document":
        spec = spec.model_copy(update={"max_failed_fraction": 0.5})
        assert plan_job(spec, DS).manifest.counts.num_rejected_rows == 1
        return
    with pytest.raises(TableError, match=rf"{DS}.*'{column}' isn't valid UTF-8 in row 1 "):
        plan_job(spec, DS)


def test_an_output_whose_run_id_is_not_utf8_is_somebody_elses(lakes: tuple[Lake, Lake]) -> None:
    append(lakes[0], input_rows(2, 1))
    append(lakes[1], [{"row_key": name, "run_id": name} for name in ("a", "b")])
    break_text(lakes[1], "run_id")
    with pytest.raises(TableError, match=r"no job of this package"):
        plan_job(spec_of(lakes), DS)


def test_input_and_output_must_be_apart(lakes: tuple[Lake, Lake]) -> None:
    append(lakes[0], input_rows())
    files = Folder.open(lakes[0].staging).find()
    with pytest.raises(SpecError, match=r"output\.uri"):
        plan_job(spec_of((lakes[0], lakes[0])), DS)
    assert Folder.open(lakes[0].staging).find() == files
