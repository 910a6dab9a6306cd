"""What only Iceberg tables have: schemas that evolve, hidden partitioning, row-level deletes."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import io
import sqlite3
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from lake.test_tables import first_call, numbers, rows, values
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import CommitFailedException, ForbiddenError, NoSuchIcebergTableError
from pyiceberg.expressions import visitors
from pyiceberg.io.pyarrow import (
    PyArrowFile,
    _get_parquet_writer_kwargs,
    _pyarrow_to_schema_without_ids,
    _read_deletes,
    schema_to_pyarrow,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.update.snapshot import _SnapshotProducer
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)
from pyiceberg.types import LongType, StringType
from pyiceberg.utils.config import Config
from support.lake_tables import (
    DS,
    IcebergLake,
    failing,
    of_plan,
    open_lake,
    publish,
    published_file,
    wrapped,
)

import batchllm_operator.lake.iceberg.read as iceberg_read
from batchllm_operator.errors import (
    BatchLLMError,
    ConflictError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.lake import LakeTable, VersionedTable, open_table
from batchllm_operator.lake.iceberg.catalog import CatalogTable
from batchllm_operator.lake.iceberg.schema import iceberg_schema
from batchllm_operator.spec import FilterTerm


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergLake:
    return IcebergLake(str(tmp_path / "lake"), tmp_path, monkeypatch)


@pytest.fixture
def table(lake: IcebergLake) -> LakeTable:
    return open_lake(lake)


def create(lake: IcebergLake, rows: pa.Table, column: str, transform: Transform[Any, Any]) -> None:
    """A table of another program, partitioned by a transform of a column."""
    schema = iceberg_schema(rows.schema)
    field = PartitionField(schema.find_field(column).field_id, 1000, transform, f"{column}_part")
    made = lake.catalog.create_table("ns.table", schema, partition_spec=PartitionSpec(field))
    if rows.num_rows:
        made.append(rows)


# Schemas that have evolved


def test_columns_are_found_by_their_ids(lake: IcebergLake, table: LakeTable) -> None:
    """Renamed, swapped, dropped and made again, at each level."""
    old = {"a": [1], "b": [2], "c": ["gone"], "s": [{"x": 1, "y": "u"}], "l": [[{"x": 1}, None]]}
    lake.append(DS, pa.table({**old, "m": pa.array([[("k", {"x": 1})]], MAP)}))
    with lake.load().update_schema() as update:
        update.rename_column("a", "t").rename_column(("s", "x"), "z")
        update.delete_column("c").add_column(("l", "new"), LongType())
        update.rename_column(("l", "x"), "renamed").rename_column(("m", "x"), "renamed")
    with lake.load().update_schema() as update:
        update.rename_column("b", "a").add_column("c", LongType())
    columns = ["t", "a", "c", "s", "l", "m"]
    assert rows(table, columns, [FilterTerm(column="t", op="<", value=2)]) == [
        {
            "t": 1,
            "a": 2,
            "c": None,
            "s": {"z": 1, "y": "u"},
            "l": [{"renamed": 1, "new": None}, None],
            "m": [("k", {"renamed": 1})],
        }
    ]
    assert rows(table, ["t"], [FilterTerm(column="c", value=3)]) == []
    assert rows(table, ["t"], [FilterTerm(column="a", value=2)]) == [{"t": 1}]


MAP = pa.map_(pa.string(), pa.struct([("x", pa.int64())]))


def test_a_column_that_was_made_wider(lake: IcebergLake, table: LakeTable) -> None:
    lake.append(DS, pa.table({"n": pa.array([1, 2], pa.int32())}))
    with lake.load().update_schema() as update:
        update.update_column("n", LongType())
    lake.append(DS, numbers(2**40))
    assert values(table) in ([1, 2, 2**40], [2**40, 1, 2])
    assert rows(table, ["n"], [FilterTerm(column="n", value=2**40)]) == [{"n": 2**40}]


def test_a_bound_that_was_cut_within_a_character(
    lake: IcebergLake, table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append(DS, pa.table({"n": [1], "text": ["é"]}))

    def cut(kind: Any, data: bytes) -> Any:
        return from_bytes(kind, data[:1] if kind == StringType() else data)

    monkeypatch.setattr("batchllm_operator.lake.iceberg.partition.from_bytes", cut)
    for column, value in (("text", "é"), ("n", 1)):
        assert rows(table, ["n"], [FilterTerm(column=column, value=value)]) == [{"n": 1}]


def test_a_snapshot_is_not_read_by_a_later_schema_that_looks_the_same(
    lake: IcebergLake, table: LakeTable
) -> None:
    """Two columns that changed names, and one that was made anew."""
    lake.append(DS, pa.table({"a": [1], "b": [2], "c": [3]}))
    lake.load().update_schema().move_first("ds").commit()
    snapshot = table.snapshot(DS)
    for change in (
        lambda update: update.rename_column("a", "x").rename_column("b", "a").delete_column("c"),
        lambda update: update.rename_column("x", "b").move_after("x", "a"),
        lambda update: update.add_column("c", LongType()),
    ):
        with lake.load().update_schema() as update:
            change(update)
    later = table.snapshot(DS)
    assert later.schema == snapshot.schema
    assert later.version != snapshot.version
    for pinned, expected in ((snapshot, (1, 2, 3)), (later, (2, 1, None))):
        [batch] = table.scan(pinned, ["a", "b", "c"])
        assert tuple(batch.to_pylist()[0].values()) == expected


def test_nulls_at_every_level(lake: IcebergLake, table: LakeTable) -> None:
    """In slices too. pyiceberg would make empty lists of null ones, reading as well as writing."""
    lists = [[{"x": 1}], None, [], [None], [{"x": None}]] * 2000
    maps = [[("k", {"x": 1})], None, [], [("k", None)], None] * 2000
    column = pa.array(lists, pa.list_(pa.struct([("x", pa.int64())])))
    publish(table, pa.table({"l": column, "m": pa.array(maps, MAP)}))
    with lake.load().update_schema() as update:
        update.rename_column(("l", "x"), "z").rename_column(("m", "x"), "z")
    found = rows(table, ["l", "m"])
    assert [row["l"] for row in found[:5]] == [[{"z": 1}], None, [], [None], [{"z": None}]]
    assert [row["m"] for row in found[:5]] == [[("k", {"z": 1})], None, [], [("k", None)], None]
    assert found == found[:5] * 2000


# Partitioning


UTC, HOUR = datetime.UTC, datetime.timedelta(hours=1)
DAYS = ((1969, 12, 31), (2026, 3, 28), (2026, 10, 24), (2026, 12, 31))
TIMES = [datetime.datetime(*day, tzinfo=UTC) + n * HOUR for day in DAYS for n in range(54)]


def fill(lake: IcebergLake, transform: Transform[Any, Any], kind: pa.DataType, spool: Path) -> None:
    """A file for each partition of `TIMES`, and one with a row of no time."""
    times = pa.array([*TIMES, None], pa.timestamp("us", "UTC"))
    data = pa.table({"n": range(len(times)), "ts": times.cast(kind)})
    create(lake, data.slice(0, 0), "ts", transform)
    find, parts = transform.transform(lake.load().schema().find_type("ts")), defaultdict(list)
    for number, micros in enumerate(times.cast(pa.int64()).to_pylist()):
        parts[find(micros)].append(number)
    for part, places in parts.items():
        pq.write_table(data.take(places), spool / f"{part}.parquet")
    lake.load().add_files([str(spool / f"{part}.parquet") for part in parts])


@pytest.mark.parametrize(
    ("transform", "kind", "num_files", "newest"),
    [
        (DayTransform(), pa.timestamp("us"), 1, "2027-01-02"),
        (HourTransform(), pa.timestamp("us", "UTC"), 24, "2027-01-02-05"),
        (MonthTransform(), pa.timestamp("us", "UTC"), 1, "2027-01"),
        (YearTransform(), pa.timestamp("us"), 1, "2027"),
    ],
    ids=str,
)
def test_a_day_has_the_rows_of_its_hours(
    lake: IcebergLake, tmp_path: Path, transform: Any, kind: Any, num_files: int, newest: str
) -> None:
    """Of 23 to 25 hours where clocks change; before 1970 as well; a row without time has no day."""
    fill(lake, transform, kind, tmp_path)
    table = open_table(lake.address, "ts")
    for table.time_zone in (None, "Europe/Berlin"):
        wanted = defaultdict(list)
        for number, at in enumerate(TIMES):
            wanted[str(at.astimezone(ZoneInfo(table.time_zone or "UTC")).date())].append(number)
        found = {day: sorted(values(table, day)) for day in wanted}
        assert found == wanted
    assert [len(found[day]) for day in ("2026-03-29", "2026-10-25")] == [23, 25]
    assert len(values(table, "2026-10-25-02")) == 2  # the hour that is repeated
    assert values(table, "2026-03-29-02") == []  # the hour that is left out
    table.time_zone = None
    assert len(table.snapshot("2026-03-29").files) == num_files
    assert table.partitions()[-1] == newest
    assert rows(table, ["n"], [FilterTerm(column="n", value=3)], "1969") == [{"n": 3}]
    assert (values(table, "2026-03-28-05"), values(table, "2030-01-01")) == ([54 + 5], [])
    assert len(values(table, "2026-12")) == 24
    for wrong in ("2026-03-28T05", "2026-3-28", "2026-02-30", "20260328", "9999", "0000"):
        with pytest.raises(TableError, match=r"isn't a year, month, day or hour.*nearest"):
            table.snapshot(wrong)
    with pytest.raises(TableError, match="partitioned by the values of 'ts' alone"):
        table.check_outputs("2030-01-01", numbers().schema)


def test_months_of_dates_are_read_by_rows_and_not_written(
    lake: IcebergLake, tmp_path: Path
) -> None:
    table, days = open_lake(lake), [datetime.date(2026, 1, day) for day in range(1, 32)]
    data = pa.table({"n": range(31), "ds": days})
    create(lake, data.slice(0, 0), "ds", MonthTransform())
    pq.write_table(data, tmp_path / "january.parquet")  # has no field ids, and gets a name mapping
    lake.load().add_files([str(tmp_path / "january.parquet")])
    assert rows(table, ["n", "ds"]) == [{"n": 30, "ds": days[-1]}]
    assert rows(table, ["n"], [FilterTerm(column="n", value=14)]) == []
    assert values(table, "2026-01") == list(range(31))
    assert (values(table, "2026-02-01"), table.partitions()) == ([], ["2026-01"])
    with pytest.raises(TableError, match="partitioned by the values of 'ds' alone"):
        publish(table, numbers(1), of_plan(partition="2026-02-01"))


def test_a_day_of_dates_is_their_value(lake: IcebergLake) -> None:
    table, day = open_lake(lake), datetime.date(1969, 12, 31)
    data = pa.table({"n": [0], "ds": [day], "run_id": [of_plan().run_id]})
    create(lake, data.slice(0, 0), "ds", DayTransform())
    for number, partition in enumerate((str(day), DS, DS)):
        publish(table, numbers(number), of_plan(f"p{number}", partition))
    assert (values(table, str(day)), values(table)) == ([0], [2])
    assert table.partitions() == [str(day), DS]


OTHER = "2026-02-01"


def lay_out(lake: IcebergLake, *columns: str) -> None:
    """Another program changes how later files are laid out."""
    kept = [field.name for field in lake.load().spec().fields]
    with lake.load().update_spec() as update:
        for name in kept:
            update.remove_field(name)
    with lake.load().update_spec() as update:
        for column in columns:
            update.add_field(column, IdentityTransform(), f"by_{column}")


def rewrite(lake: IcebergLake, of: str) -> None:
    """Another program compacts rows, whose files are laid out by the newest specification then."""
    lake.load().overwrite(lake.load().scan(of).to_arrow(), overwrite_filter=of)


def test_old_files_of_a_day_are_replaced_however_they_are_laid_out(lake: IcebergLake) -> None:
    """From `ds` to (`ds`, `n`), to no partitions, and back to `ds`."""
    table = open_lake(lake)
    for partition in (DS, OTHER):
        publish(table, numbers(1, 2), of_plan(partition=partition))
    for number, columns in enumerate([("ds", "n"), (), ("ds",)], 2):
        lay_out(lake, *columns)
        newest = lake.load().spec()
        for once_more in ("a", "b"):
            publish(table, numbers(number, number), of_plan(f"p{number}{once_more}"))
        rewrite(lake, f"ds = '{DS}'")
        [task] = lake.load().scan(f"ds = '{DS}'").plan_files()
        assert task.file.spec_id == newest.spec_id
        publish(table, numbers(*[number * 10] * 3), of_plan(f"p{number}"))
        found = lake.load().scan().to_arrow().group_by("ds").aggregate([("n", "list")]).to_pylist()
        assert {row["ds"]: row["n_list"] for row in found} == {DS: values(table), OTHER: [1, 2]}
        assert (values(table), lake.load().spec()) == ([number * 10] * 3, newest)
        assert table.partitions() == [DS, OTHER]


def test_a_file_with_rows_of_other_days_is_not_replaced(lake: IcebergLake) -> None:
    table = open_lake(lake)
    for partition in (DS, OTHER):
        publish(table, numbers(1, 2), of_plan(partition=partition))
    lay_out(lake)
    rewrite(lake, f"ds in ('{DS}', '{OTHER}')")
    assert table.published(DS) == of_plan()
    with pytest.raises(TableError, match=f"2 rows of partition '{DS}' and 2 of others.*rewrite"):
        table.check_outputs(DS, numbers().schema.append(pa.field("run_id", pa.string())))
    between = "2026-01-31-05"  # between the bounds of the file, which has none of its rows
    publish(table, numbers(3), of_plan(partition=between))
    assert (values(table), values(table, OTHER), values(table, between)) == ([1, 2], [1, 2], [3])


def test_a_format_that_pyiceberg_does_not_write(
    lake: IcebergLake, table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.append(DS, numbers(1))
    monkeypatch.setattr(Table, "format_version", 3)
    assert rows(table, ["n"]) == [{"n": 1}]
    with pytest.raises(TableError, match="format version 3"):
        table.check_outputs("2026-02-01", numbers().schema)


# Deletes


class DeleteManifestWriter(ManifestWriterV2):
    """pyiceberg writes manifests of data files only."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def delete_rows(lake: IcebergLake, places: list[int]) -> None:
    """Delete rows of the table's only file by place, as Spark's merge-on-read does."""
    table = lake.load()
    [task] = table.scan().plan_files()
    path = f"{table.location()}/data/deletes.parquet"
    fields = [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
    ]
    deletes = pa.table(
        [[task.file.file_path] * len(places), places],
        schema=pa.schema(fields),
    )
    with table.io.new_output(path).create() as file:
        pq.write_table(deletes, file)
    transaction = table.transaction()
    producer = transaction.update_snapshot().fast_append()
    entry = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=task.file.partition,
        record_count=len(places),
        file_size_in_bytes=len(table.io.new_input(path)),
        spec_id=task.file.spec_id,
    )
    manifests = producer._manifests

    def with_deletes() -> Any:
        output = producer.new_manifest_output()
        spec, schema = table.spec(), table.schema()
        with DeleteManifestWriter(spec, schema, output, producer.snapshot_id, "deflate") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=producer.snapshot_id,
                    data_file=entry,
                )
            )
        return [*manifests(), writer.to_manifest_file()]

    producer._manifests = with_deletes
    producer.commit()
    transaction.commit_transaction()


def test_deleted_rows_stay_deleted(lake: IcebergLake, table: LakeTable) -> None:
    publish(table, numbers(*range(10_000)))
    delete_rows(lake, [0, 5, 9_999])
    left = [n for n in range(10_000) if n not in (0, 5, 9_999)]
    assert values(table) == left
    assert rows(table, ["n"], [FilterTerm(column="n", op="<", value=7)]) == [
        {"n": n} for n in (1, 2, 3, 4, 6)
    ]
    assert table.published(DS) == of_plan()
    publish(table, numbers(*range(100)), of_plan("p2"))
    assert values(table) == list(range(100))
    assert lake.load().scan().to_arrow().num_rows == 100


class FailingFile(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError("AWS Error SLOW_DOWN")


@pytest.mark.parametrize("what", ["reading", "deletes", "opening"])
def test_storage_that_fails_while_rows_are_read(
    lake: IcebergLake, table: LakeTable, what: str
) -> None:
    """Its errors have no errno: they aren't taken for those of damaged files, which are final."""
    publish(table, numbers(*range(100)))
    if what == "deletes":
        delete_rows(lake, [0])
    snapshot = table.snapshot(DS)

    def fail(real: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if what != "deletes" and not file.location.endswith(".parquet"):
            return real(file, *args, **kwargs)
        return FailingFile(b"?" * 99) if what == "reading" else FailingFile().read()

    target = (iceberg_read, "_read_deletes") if what == "deletes" else (PyArrowFile, "open")
    with wrapped(target, fail), pytest.raises(StorageError, match="SLOW_DOWN"):
        list(table.scan(snapshot, ["n"]))


# Commits


def test_a_publish_is_one_snapshot_that_names_the_job(lake: IcebergLake) -> None:
    table = open_table(lake.address, "ds", 20_000)
    publish(table, numbers(1), of_plan(partition="other"))
    for number, plan_id in enumerate(("p1", "p2")):
        publish(table, numbers(*range(5000)), of_plan(plan_id))
        assert values(table) == list(range(5000))
        files = table.snapshot(DS).files
        assert len(files) > 2 and max(file.size_bytes for file in files) <= 20_000
        assert len(lake.load().snapshots()) == number + 2
    summary = lake.load().current_snapshot().summary
    assert summary["batchllm.job"] == "job"
    assert summary["batchllm.partition"] == DS
    assert summary["batchllm.plan-id"] == "p2"
    found = lake.load().scan().to_arrow()  # by another reader
    assert found.num_rows == 5001
    assert {"n", "run_id", "ds"} == set(found.column_names)


def test_manifests_that_are_looked_at_at_once_are_not_taken_for_each_other(
    lake: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(visitor: Any, manifest: Any) -> bool:
        visitor.partition_fields = manifest.partitions
        time.sleep(0.02)  # another thread looks at another manifest
        return bool(visitors.visit(visitor.partition_filter, visitor))

    table = open_table(lake.address, "ds")
    for partition in ("2026-01-29", "2026-01-30", DS):
        publish(table, numbers(1), of_plan(partition=partition))
    monkeypatch.setattr(visitors._ManifestEvalVisitor, "eval", evaluate)
    publish(table, numbers(2), of_plan("p2"))
    assert values(table) == [2]


def test_files_are_made_on_the_disk_that_holds_the_rows(
    table: LakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's tasks have a disk of their own, and TMPDIR may be small there."""
    assert isinstance(table, VersionedTable)
    data = published_file(tmp_path / "rows.parquet", numbers(1, 2), of_plan())
    staging = table.staging(DS, pq.read_schema(data))
    with monkeypatch.context() as without_disk:
        without_disk.setattr("tempfile.tempdir", str(tmp_path / "no-such-disk"))
        files = staging.put(data)
    assert [file.footer.num_rows for file in files] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "catalog.db",
        "lake",
        "rows.parquet",
    ]


def test_statistics_are_written_for_other_readers(lake: IcebergLake, table: LakeTable) -> None:
    publish(table, numbers(3, 1, 2))
    [task] = lake.load().scan("n >= 3").plan_files()
    assert task.file.record_count == 3
    assert list(lake.load().scan("n > 3").plan_files()) == []
    [path] = lake.data_files()
    with lake.folder.open_file(path) as file:
        schema = pq.read_schema(file)
    assert schema.field("n").metadata[b"PARQUET:field_id"] == b"1"
    assert schema.names == schema_to_pyarrow(lake.load().schema()).names


def test_the_tables_limit_of_rows_in_a_row_group_is_kept(
    lake: IcebergLake, table: LakeTable
) -> None:
    lake.create(numbers().schema.append(pa.field("run_id", pa.string())))
    with lake.load().transaction() as transaction:
        transaction.set_properties({"write.parquet.row-group-limit": "3"})
    publish(table, numbers(*range(7)))
    [path] = lake.data_files()
    with lake.folder.open_file(path) as file:
        footer = pq.read_metadata(file)
    assert [footer.row_group(idx).num_rows for idx in range(footer.num_row_groups)] == [3, 3, 1]
    assert values(table) == list(range(7))


@pytest.mark.parametrize("refusal", [CommitFailedException, ForbiddenError])
def test_a_refused_commit_leaves_no_files(
    lake: IcebergLake, table: LakeTable, monkeypatch: pytest.MonkeyPatch, refusal: Any
) -> None:
    publish(table, numbers(0), of_plan("p0"))
    before = {name for name in lake.folder.find() if not name.endswith(".metadata.json")}
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    tries: list[int] = []

    def refuse(real: Any, *args: Any) -> Any:
        tries.append(1)
        raise refusal("somebody else was faster")

    with wrapped(lake.commit, refuse), pytest.raises(StorageError, match="commit again"):
        publish(table, numbers(1))
    assert len(tries) > 3
    assert {n for n in lake.folder.find() if not n.endswith(".metadata.json")} == before


def test_a_commit_that_was_never_answered_keeps_its_files(
    lake: IcebergLake, table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still happen, whatever the table looks like now."""
    publish(table, numbers(0), of_plan("p0"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    late: list[Any] = []

    def delay(real: Any, *args: Any) -> Any:
        late.append((real, args))
        raise TimeoutError

    with wrapped(lake.commit, delay), pytest.raises(Exception, match="commit again"):
        publish(table, numbers(1))
    assert values(table) == [0]
    real, args = late[0]
    real(*args)
    assert values(table) == [1]
    with pytest.raises(CommitFailedException):
        late[1][0](*late[1][1])
    publish(table, numbers(1), replaces=of_plan("p0"))
    assert values(table) == [1]
    for _, (catalog, *_) in late:  # closed since; the late commits have opened them again
        catalog.close()


def test_a_lost_answer_of_a_commit_that_was_replaced_meanwhile(
    lake: IcebergLake, table: LakeTable
) -> None:
    """The table's history tells that it happened, when its rows no longer do."""
    publish(table, numbers(0), of_plan("p0"))
    lost: list[str] = []

    def lose_answer(real: Any, *args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        if lost:
            return answer
        lost.append("the answer")
        publish(open_lake(lake), numbers(2), of_plan("p2"))
        raise lake.lost

    with wrapped(lake.commit, lose_answer):
        publish(table, numbers(1))
    assert lost and values(table) == [2]
    assert table.published(DS) == of_plan("p2")


def test_another_writer_creates_the_table_and_publishes_first(
    lake: IcebergLake, table: LakeTable
) -> None:
    def win() -> None:
        publish(open_lake(lake), numbers(1), of_plan("winner"))

    creation = (CatalogTable, "create")
    with wrapped(creation, first_call(win)), pytest.raises(ConflictError, match="winner"):
        publish(table, numbers(2), of_plan("loser"), replaces=None)
    assert (values(table), table.published(DS)) == ([1], of_plan("winner"))


def test_a_column_that_is_added_meanwhile(lake: IcebergLake, table: LakeTable) -> None:
    """Files that were written before it stay what the table wants."""
    publish(table, numbers(0), of_plan("p0"))

    def add() -> None:
        with lake.load().update_schema() as update:
            update.add_column("more", LongType())

    with wrapped(lake.commit, first_call(add)):
        publish(table, numbers(1))
    assert rows(table, ["n", "more"]) == [{"n": 1, "more": None}]
    assert len(lake.data_files()) == 2


def test_a_commit_that_sqlite_refuses_is_not_taken_for_done(
    lake: IcebergLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that asked sees what it could not commit, until it is closed."""
    publish(open_lake(lake), numbers(1))
    database = tmp_path / "catalog.db"
    uri = f"sqlite:///{database}?timeout=0.1"
    monkeypatch.setenv("PYICEBERG_CATALOG__TESTS__URI", uri)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    reader = sqlite3.connect(database, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM iceberg_tables").fetchall()  # a lock, as of a paused process
    refused: list[str] = []

    def commit(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            refused.append(str(error))
            raise
        finally:
            if len(refused) == 2:
                reader.execute("ROLLBACK")

    with contextlib.closing(reader), wrapped(lake.commit, commit):
        publish(open_lake(lake), numbers(2, 3), whose=of_plan("b" * 16))
    assert len(refused) == 2 and "database is locked" in refused[0]
    assert lake.load().scan().to_arrow()["n"].to_pylist() == [2, 3]
    assert len(lake.load().snapshots()) == 2


def test_a_table_closes_its_catalog_when_it_goes(
    lake: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 warns of connections to SQLite that are still open."""
    closed: list[str] = []
    close = SqlCatalog.close

    def noted(catalog: SqlCatalog) -> None:
        closed.append(catalog.name)
        close(catalog)

    monkeypatch.setattr(SqlCatalog, "close", noted)
    table = open_lake(lake)
    assert closed == []
    del table
    assert closed == ["tests"]


# What isn't public in pyiceberg


PRIVATE: dict[Any, list[str]] = {
    Table._do_commit: ["self", "updates", "requirements"],
    _SnapshotProducer._clean_all_uncommitted: ["self"],
    _SnapshotProducer._build_manifest_evaluator: ["self", "spec_id"],
    _read_deletes: ["io", "data_file"],
    _get_parquet_writer_kwargs: ["table_properties"],
    _pyarrow_to_schema_without_ids: ["schema", "downcast_ns_timestamp_to_us", "format_version"],
}


@pytest.mark.parametrize("function", PRIVATE, ids=lambda function: function.__qualname__)
def test_a_private_function_that_is_called_has_its_arguments(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == PRIVATE[function]


def test_a_transaction_holds_what_a_commit_sends(lake: IcebergLake) -> None:
    lake.append(DS, numbers(1))
    transaction = lake.load().transaction()
    assert (transaction._updates, transaction._requirements) == ((), ())
    transaction.set_properties(a="b")
    assert transaction._updates


# Catalogs


def test_a_catalog_that_is_not_set_up() -> None:
    with pytest.raises(SpecError, match="catalog 'nowhere' can't be set up"):
        open_table("iceberg://nowhere/ns.table", "ds")


def configure(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """A catalog `canary`."""
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__CANARY__{name}", value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it was read at import


@pytest.mark.parametrize(
    "settings",
    [
        {"URI": "mysql://user:SECRET@host/db"},
        {"URI": "http://127.0.0.1:1/?token=SECRET"},
        {"URI": "http://127.0.0.1:1/", "TOKEN": "SECRET\n"},
        {"URI": "http://user:SECRET@127.0.0.1:1/", "CREDENTIAL": "id:SECRET"},
    ],
    ids=str,
)
def test_secrets_of_a_catalog_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    configure(monkeypatch, **settings)
    with pytest.raises((SpecError, StorageError)) as caught:
        open_table("iceberg://canary/ns.table", "ds").published(DS)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_secrets_that_a_server_repeats(
    lake: IcebergLake,
    table: LakeTable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("S3__SECRET_ACCESS_KEY", "S3__SESSION_TOKEN", "HEADER__AUTHORIZATION"):
        monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{name}", f"SECRET/{name}")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    publish(table, numbers(0), of_plan("p0"))
    echo = "no SECRET/S3__SECRET_ACCESS_KEY, SECRET/HEADER__AUTHORIZATION, ftp://me:SECRET@host"
    for target, kind in (
        (lake.commit, CommitFailedException),
        (lake.commit, ConnectionError),
        (lake.read, ConnectionError),
        ((PyArrowFile, "create"), ValueError),
        ((PyArrowFile, "create"), StorageError),
    ):
        error = kind(echo)
        error.__cause__ = RuntimeError("SECRET/S3__SESSION_TOKEN")
        with wrapped(target, failing(error)), pytest.raises(BatchLLMError) as caught:
            publish(table, numbers(1), replaces=of_plan("p0"))
        assert "no ***, ***, ftp://***@host" in str(caught.value)
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))
    assert "***" in caplog.text
    assert "SECRET" not in caplog.text


def test_what_is_no_iceberg_table(lake: IcebergLake, table: LakeTable) -> None:
    """As a Hive or Glue catalog has it: not nothing, which a job would fill."""
    a_view = failing(NoSuchIcebergTableError("it is a view"))
    with wrapped(lake.read, a_view), pytest.raises(TableError, match="isn't an Iceberg table"):
        table.published(DS)


def test_a_namespace_that_is_not_there(lake: IcebergLake) -> None:
    table = open_table("iceberg://tests/no.table", "ds")
    assert table.partitions() == []
    with pytest.raises(TableError, match=r"create namespace no` or.* `CREATE NAMESPACE tests.no`"):
        publish(table, numbers(1))
    with pytest.raises(TableError, match="no such namespace"):
        table.check_outputs(DS, numbers().schema)


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        (
            datetime.date(2026, 1, 31),
            "2026-01-31 00:00:00",
            "holds date, and .* isn't one; name one with --ds .*nearest .* are '2026-01-31'",
        ),
        (20260131, "2026-01-31", "holds long, and .*nearest partitions are '20260131'"),
    ],
)
def test_a_name_that_is_not_of_the_partition_columns_type_is_shown_beside_the_nearest(
    lake: IcebergLake, value: Any, name: str, message: str
) -> None:
    create(lake, pa.table({"n": [1], "at": [value]}), "at", IdentityTransform())
    with pytest.raises(TableError, match=message):
        open_table(lake.address, "at").snapshot(name)
