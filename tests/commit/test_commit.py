"""The commit stage: all rows or nothing, in input order, once."""

import datetime
import shutil
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Batchllm
from support.fake_job import DS, document_rows, expected_prompt, fake_spec, planned, write_table
from support.staged_job import run_only

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.commit.commit_run import commit_run, published_plan_uri
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import FailedRowsError, IncompleteRunError, PlanError, TableError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards import buckets, joining
from batchllm_operator.shards.parts import PART_SCHEMA, ShardFiles
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def run_job(spec: JobSpec) -> StoredPlan:
    """Run the job to its end, as if more rows were allowed to fail, which would end it early."""
    plan = plan_job(spec.model_copy(update={"max_failed_fraction": 1.0}), DS)
    run_worker(plan)
    return plan_job(spec, DS)


def published(lake: Path) -> pa.Table:
    return pq.ParquetFile(lake / "out" / f"ds={DS}" / "data.parquet").read()


def expected_text(row: dict[str, str]) -> str:
    return fake_text(list(expected_prompt(row).encode()))


@pytest.mark.parametrize("bucket_rows", [1, 7, 40, 1 << 16])
def test_rows_come_out_in_input_order(
    tmp_path: Path, bucket_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_ROWS", bucket_rows)
    for module in (buckets, joining):
        monkeypatch.setattr(module, "_SLICE_ROWS", max(bucket_rows // 2, 1))
    rows = document_rows(8, 5)
    rows[3] = {**rows[3], "document": None}
    rows[11] = {**rows[20], "row_key": "a duplicate"}
    write_table(tmp_path / "documents", rows)
    plan = run_job(fake_spec(tmp_path))
    report = commit_run(plan.folder.uri)
    table = published(tmp_path).to_pylist()
    assert [row["row_key"] for row in table] == [row["row_key"] for row in rows]
    for idx, (found, row) in enumerate(zip(table, rows, strict=True)):
        assert found["query"] == row["query"]
        assert found["run_id"] == f"job/{DS}/{plan.manifest.plan_id}"
        if idx == 3:
            assert found["generated_text"] is None
            message = "column 'document' is null"
            assert found["error"] == {"kind": "null_value", "message": message}
        else:
            assert (found["generated_text"], found["error"]) == (expected_text(row), None)
            assert found["num_prompt_tokens"] == len(expected_prompt(row))
    assert table[20]["num_cached_tokens"] == table[20]["num_prompt_tokens"]  # 11 computed it
    assert (report.plan.num_rows, report.num_rows_out, report.num_failed_rows) == (40, 39, 1)
    assert report.plan.num_duplicate_rows == 1


def test_readers_of_the_output_folder_see_the_partition_only(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    commit_run(run_job(fake_spec(tmp_path)).folder.uri)
    table = pq.read_table(tmp_path / "out")  # readers that skip names with an underscore
    assert (table.num_rows, set(table["ds"].to_pylist())) == (4, {DS})
    spec = fake_spec(tmp_path, output={"staging_uri": str(tmp_path / "staging")})
    shutil.rmtree(tmp_path / "out")
    commit_run(run_job(spec).folder.uri)
    files = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    assert files == [tmp_path / "out" / f"ds={DS}" / "data.parquet"], (
        "for readers that skip nothing"
    )


def test_commit_before_run_names_the_shards(tmp_path: Path) -> None:
    plan = planned(tmp_path, document_rows())
    run_only(plan, 1)
    missing = r"unfinished: shard 0 \(0 of 3 parts\); run `batchllm run --plan /.*`, then commit"
    with pytest.raises(IncompleteRunError, match=missing):
        commit_run(plan.folder.uri)
    assert not (tmp_path / "out" / f"ds={DS}").exists()


def test_a_later_run_replaces_the_partition_and_no_other(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    write_table(tmp_path / "documents", document_rows(1, 1), ds="2026-02-01")
    spec = fake_spec(tmp_path)
    other = plan_job(spec, "2026-02-01")
    run_worker(other)
    commit_run(other.folder.uri)
    first = run_job(spec)
    commit_run(first.folder.uri)
    write_table(tmp_path / "documents", document_rows(2, 3))
    second = run_job(spec)
    commit_run(second.folder.uri)
    assert published(tmp_path).num_rows == 6
    assert published_plan_uri(spec, DS) == second.folder.uri
    with pytest.raises(PlanError, match="a later plan's outputs have replaced"):
        commit_run(first.folder.uri)  # a retry of a task long past
    assert published_plan_uri(spec, DS) == second.folder.uri
    write_table(tmp_path / "documents", document_rows())
    assert plan_job(spec, DS).folder == first.folder  # the earlier input came back
    commit_run(first.folder.uri)
    assert published_plan_uri(spec, DS) == first.folder.uri
    assert published(tmp_path).num_rows == 30
    assert published_plan_uri(spec, "2026-02-01") == other.folder.uri


def test_two_inputs_that_take_turns(tmp_path: Path) -> None:
    """Each plan was planned after the other at some time; the last time counts."""
    inputs = document_rows(4, 5), document_rows(2, 3)
    plans = []
    for rows in (*inputs, *inputs):
        write_table(tmp_path / "documents", rows)
        plans.append(run_job(fake_spec(tmp_path)))
    assert plans[:2] == plans[2:]
    older, newer = plans[2:]
    assert (older.older_plans(), newer.older_plans()) == (set(), {older.manifest.plan_id})
    commit_run(newer.folder.uri)
    with pytest.raises(PlanError, match="a later plan's outputs have replaced"):
        commit_run(older.folder.uri)
    assert len(published(tmp_path)) == 6


def test_a_plan_of_another_output_table_is_no_older_one(tmp_path: Path) -> None:
    """Two specs of one job may have one folder for their plans."""
    write_table(tmp_path / "documents", document_rows(2, 3))
    staging = str(tmp_path / "staging")
    first = run_job(fake_spec(tmp_path, output={"staging_uri": staging}))
    elsewhere = {"uri": str(tmp_path / "elsewhere"), "staging_uri": staging}
    second = run_job(fake_spec(tmp_path, output=elsewhere))
    commit_run(second.folder.uri)
    commit_run(first.folder.uri)
    assert len(published(tmp_path)) == 6


def test_a_note_of_a_later_plan_that_cannot_be_read_is_one(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 3))
    plan = run_job(fake_spec(tmp_path))
    (Path(plan.folder.path) / "superseded.json").write_bytes(b"[")
    with pytest.raises(PlanError, match="a later plan's outputs have replaced"):
        commit_run(plan.folder.uri)


@pytest.mark.parametrize(
    "note",
    [b"", b"{}", b"[1]", b'{"turn": []}', b'{"turn": 1e999}', b'{"turn": "x"}', b"[" * 99999],
)
def test_a_turn_that_cannot_be_read_is_the_first(tmp_path: Path, note: bytes) -> None:
    write_table(tmp_path / "documents", document_rows())
    plan = run_job(fake_spec(tmp_path))
    (Path(plan.folder.path) / "turn.json").write_bytes(note)
    commit_run(plan.folder.uri)


@pytest.mark.parametrize(("num_failed", "last_line"), [(0, "0 %"), (1, "5.0 %")])
def test_one_row_in_twenty_may_fail_and_the_last_line_says_how_many(
    tmp_path: Path, batchllm: Batchllm, num_failed: int, last_line: str
) -> None:
    rows = document_rows(4, 5)
    for row in rows[:num_failed]:
        row["query"] = None
    write_table(tmp_path / "documents", rows)
    plan = run_job(fake_spec(tmp_path))
    outcome = batchllm("commit", "--plan", plan.folder.uri)
    assert outcome.code == 0, outcome.err
    expected = f"20 rows published, {num_failed} failed ({last_line})"
    assert outcome.out.splitlines()[-1] == expected


@pytest.mark.parametrize(("allowed", "published_rows"), [(0.2, 15), (0.1, None)])
def test_too_many_failed_rows_publish_nothing(
    tmp_path: Path, allowed: float, published_rows: int | None
) -> None:
    rows = document_rows(3, 5)
    rows[0]["query"] = None
    rows[4]["query"] = rows[5]["query"] = "~"
    write_table(tmp_path / "documents", rows)
    engine = {"extra_args": {"error_token_id": ord("~")}}
    plan = run_job(fake_spec(tmp_path, engine=engine, max_failed_fraction=allowed))
    if published_rows is not None:
        assert commit_run(plan.folder.uri).num_failed_rows == 3
        assert published(tmp_path).num_rows == published_rows
        return
    with pytest.raises(FailedRowsError) as refused:
        commit_run(plan.folder.uri)
    for said in (
        "3 of 15 rows failed, 20.0 % (2 engine_error, 1 null_value)",
        f"max_failed_fraction {allowed} allows; nothing was published",
        "First engine_error: row_key d1-q1: 'engine_error: ",
        f"To publish all the same: `batchllm commit --plan {plan.folder.uri} --accept`",
    ):
        assert said in str(refused.value)
    assert not (tmp_path / "out" / f"ds={DS}").exists()
    # Raising the limit and planning again keeps what was generated.
    spec = fake_spec(tmp_path, engine=engine, max_failed_fraction=1.0)
    assert plan_job(spec, DS).folder == plan.folder
    assert commit_run(plan.folder.uri).num_rows_out == 12


def test_parts_of_another_plan_are_not_published(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows())
    plan = run_job(fake_spec(tmp_path))
    folder, other = plan.run_folder(0), plan.run_folder(1)
    for entry in ShardFiles.of(plan, 1).ledger().values():  # whole parts of other rows
        folder.write_bytes(entry.path, other.read_bytes(entry.path))
        name = f"attempt-00001/part-{entry.part_idx:05d}.json"
        folder.write_bytes(name, other.read_bytes(name))
    with pytest.raises(PlanError, match="has 2 outputs where the plan wants 1"):
        commit_run(plan.folder.uri)
    assert not (tmp_path / "out" / f"ds={DS}").exists()


def test_another_jobs_partition_is_not_replaced(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    spec, other = fake_spec(tmp_path), fake_spec(tmp_path, name="other")
    late = run_job(other)
    commit_run(run_job(spec).folder.uri)
    for refused in (
        lambda: plan_job(other, DS),
        lambda: commit_run(late.folder.uri),
        lambda: published_plan_uri(other, DS),
    ):
        with pytest.raises(TableError, match="holds the outputs of job 'job'"):
            refused()
    assert published(tmp_path)["run_id"][0].as_py().startswith("job/")


def test_a_key_may_be_called_row_idx(tmp_path: Path) -> None:
    rows = [{**row, "row_idx": 1000 + 7 * n} for n, row in enumerate(document_rows(3, 3))]
    write_table(tmp_path / "documents", rows)
    commit_run(run_job(fake_spec(tmp_path, input={"key": "row_idx"})).folder.uri)
    assert published(tmp_path)["row_idx"].to_pylist() == [row["row_idx"] for row in rows]


def test_one_request_may_stand_for_very_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_SLICE_ROWS", 10)
    row = document_rows(1, 1)[0]
    rows = [{**row, "row_key": n} for n in range(1000)]
    write_table(tmp_path / "documents", rows)
    report = commit_run(run_job(fake_spec(tmp_path)).folder.uri)
    assert (report.plan.num_requests, report.plan.num_duplicate_rows) == (1, 999)
    assert published(tmp_path)["generated_text"].to_pylist() == [expected_text(row)] * 1000


def test_small_parts_are_sorted_in_few_pieces(tmp_path: Path) -> None:
    """Each piece of a bucket costs a write and a read, whatever its size."""

    class Small:
        def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
            for idx in range(100):
                row = {"request_idx": idx, "row_idxs": [99 - idx], "generated_text": "x"}
                yield pa.Table.from_pylist([row], schema=PART_SCHEMA).select(columns)

    [path], _ = buckets.spread([Small()], PART_SCHEMA, 100, tmp_path)
    with pa.ipc.open_stream(path) as file:
        assert file.read_all()["row_idx"].num_chunks == 1
    assert buckets.read_bucket(path)["row_idx"].to_pylist() == list(range(100))


def test_types_of_keys_and_carried_columns_survive(tmp_path: Path) -> None:
    """Over two files, whose dictionaries differ."""
    kept = {
        "day": [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)],
        "price": [Decimal("1.50"), None],
        "tags": [["a", "b"], []],
        "origin": [{"site": "x"}, {"site": None}],
        "at": [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)] * 2,
    }
    table = pa.table({"document": ["a", "b"], "query": ["c", "d"], "number": [1, 2], **kept})
    category = pa.array(["red", "blue"]).dictionary_encode()
    table = table.append_column("category", category)
    folder = tmp_path / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    for row in range(2):
        own = pa.array([category[row].as_py()]).dictionary_encode()
        file = table.slice(row, 1).set_column(table.num_columns - 1, "category", own)
        pq.write_table(file, folder / f"{row}.parquet")
    carried = [*kept, "category"]
    spec = fake_spec(
        tmp_path,
        input={"key": ["number", "day"]},
        prompt={"system": None, "template": "{category}"},
        output={"carry": carried},
    )
    commit_run(run_job(spec).folder.uri)
    found = published(tmp_path)
    texts = [fake_text(list(color.encode())) for color in ("red", "blue")]
    assert found["generated_text"].to_pylist() == texts
    for name in ("number", *carried):
        assert found[name].to_pylist() == table[name].to_pylist(), name
        assert found.schema.field(name).type == table.schema.field(name).type, name


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2, 3], pa.timestamp("ns")),
        pa.array([1, 2, 3], pa.time64("ns")),
        pa.array([2_932_897, 2_932_898, 2_932_899], pa.date32()),  # after the year 9999
    ],
    ids=lambda values: str(values.type),
)
def test_keys_that_python_cannot_hold_are_published_and_reported(
    tmp_path: Path, values: pa.Array
) -> None:
    """A failed row's key is told as well."""
    table = pa.table({"document": ["a", "b", None], "query": ["c", "d", "e"], "id": values})
    folder = tmp_path / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "a.parquet")
    spec = fake_spec(tmp_path, input={"key": "id"}, output={"carry": []}, max_failed_fraction=0.5)
    report = commit_run(run_job(spec).folder.uri)
    first = ["10000-01-01", "10000-01-03"] if pa.types.is_date(values.type) else ["1", "3"]
    assert [report.sample_rows[0].key["id"], report.errors[0].example_keys[0]["id"]] == first
    assert published(tmp_path)["id"].combine_chunks() == values


def test_before_the_commit_there_is_neither_a_report_nor_a_published_plan(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(4, 5))
    spec = fake_spec(tmp_path)
    plan = run_job(spec)
    with pytest.raises(PlanError, match="wasn't committed yet"):
        load_report(plan.folder.uri)
    with pytest.raises(TableError, match="has not been published"):
        published_plan_uri(spec, DS)
    assert commit_run(plan.folder.uri) == load_report(plan.folder.uri)
