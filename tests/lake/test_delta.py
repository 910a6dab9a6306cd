"""What is Delta's own, `test_tables` has what all lake tables promise; S3: `full/`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable as RawTable
from lake.test_tables import KINDS, numbers, rows, values
from support.lake_tables import (
    DS,
    delta_options,
    failing,
    of_plan,
    published_file,
    wrapped,
    write_delta,
)
from support.lake_tables import publish as publish_rows

from batchllm_operator.errors import (
    BatchLLMError,
    CommitUnknownError,
    ConflictError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.lake.delta.log import DeltaLog
from batchllm_operator.lake.delta.table import DeltaTable
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage import Folder

HOSTILE = "a/../b ü%2F'\"=&?#\\:*|<>^{}~`[]"
Publish = Callable[..., None]


@pytest.fixture
def folder(lake_uri: str) -> Folder:
    return Folder.open(lake_uri).child("table")


@pytest.fixture
def table(folder: Folder) -> DeltaTable:
    return DeltaTable(folder.uri, "ds")


@pytest.fixture
def publish(table: DeltaTable) -> Publish:
    """Publishes numbers, and other columns, as the outputs of a plan."""

    def publish(plan_id: str, *values: int, partition: str = DS, **columns: Any) -> None:
        options = {key: columns.pop(key) for key in ("add_columns", "replaces") if key in columns}
        given = pa.table({"n": pa.array(values, pa.int64()), **columns})
        publish_rows(table, given, of_plan(plan_id, partition), **options)

    return publish


def raw(folder: Folder, version: int | None = None) -> RawTable:
    return RawTable(folder.uri, version=version, storage_options=delta_options(folder))


def theirs(*values: int, ds: Any = DS, **columns: Any) -> pa.Table:
    """Rows of another writer."""
    return pa.table({"n": values, **columns, "ds": [ds] * len(values)})


def edit_log(folder: Folder, version: int, action: str, **changes: Any) -> None:
    name = f"_delta_log/{version:020}.json"
    lines = [json.loads(line) for line in folder.read_bytes(name).splitlines()]
    for line in lines:
        if action in line:
            line[action].update(changes)
    folder.write_bytes(name, "\n".join(map(json.dumps, lines)).encode())


def data_files(folder: Folder) -> list[str]:
    return [name for name in folder.find() if name.endswith(".parquet")]


# Snapshots


def test_files_whose_rows_were_not_counted(folder: Folder, table: DeltaTable) -> None:
    write_delta(folder, theirs(1, 2))
    edit_log(folder, 0, "add", stats=None)
    assert [file.num_rows for file in table.snapshot(DS).files] == [2]


@pytest.mark.parametrize("path", ["../other/a.parquet", "/etc/passwd", "s3://other/a.parquet"])
def test_files_outside_of_the_table(folder: Folder, table: DeltaTable, path: str) -> None:
    write_delta(folder, theirs(1))
    edit_log(folder, 0, "add", path=path)
    with pytest.raises(TableError, match="outside of its folder"):
        table.snapshot(DS)


def test_features_that_cannot_be_read_are_named(folder: Folder, table: DeltaTable) -> None:
    write_delta(folder, theirs(1))
    features = {"readerFeatures": ["typeOfTomorrow"], "writerFeatures": ["typeOfTomorrow"]}
    edit_log(folder, 0, "protocol", minReaderVersion=3, minWriterVersion=7, **features)
    for read in (table.snapshot, table.published):
        with pytest.raises(TableError, match="typeOfTomorrow"):
            read(DS)


def test_a_damaged_log(folder: Folder, table: DeltaTable) -> None:
    write_delta(folder, theirs(1))
    folder.write_bytes(f"_delta_log/{0:020}.json", b'{"add": 1')
    with pytest.raises(TableError, match="its log is damaged"):
        table.snapshot(DS)


# Scans


@pytest.mark.parametrize("bound", ["minValues", "maxValues"])
def test_statistics_that_are_not_numbers(folder: Folder, table: DeltaTable, bound: str) -> None:
    """Spark has NaN as the greatest of all."""
    write_delta(folder, theirs(1, 2, x=[float("nan"), 9.0]))
    stats = {"numRecords": 2, "minValues": {"x": 9.0}, "maxValues": {"x": 9.0}}
    stats[bound] = {"x": "NaN"}
    edit_log(folder, 0, "add", stats=json.dumps(stats))
    for term in (FilterTerm(column="x", op=">", value=5.0), FilterTerm(column="x", value=9.0)):
        assert rows(table, ["x"], [term]) == [{"x": 9.0}]


def test_filters_of_types_whose_order_is_not_pythons(folder: Folder, table: DeltaTable) -> None:
    amounts = pa.array([Decimal("0.10")], pa.decimal128(10, 2))
    write_delta(folder, theirs(1, amount=amounts, x=pa.array([0.1], pa.float32())))
    for column, op, value in (("amount", "==", 0.1), ("amount", "<", 0.2), ("x", ">", 0.05)):
        assert rows(table, ["n"], [FilterTerm(column=column, op=op, value=value)]) == [{"n": 1}]


def test_further_partition_columns(folder: Folder, table: DeltaTable, publish: Publish) -> None:
    data = theirs(1, 2, 3, region=pa.array([1, 2, None], pa.int32()))
    write_delta(folder, data, partition_by=["region", "ds"])
    found = sorted(rows(table, ["n", "region"]), key=lambda row: row["n"])
    assert [row["region"] for row in found] == [1, 2, None]
    term = FilterTerm(column="region", op="==", value=2)
    assert rows(table, ["n"], [term]) == [{"n": 2}]
    with pytest.raises(TableError, match="is partitioned by region, ds"):
        publish("a", 1, partition="other")


def test_types_have_deltas_words(folder: Folder, table: DeltaTable, publish: Publish) -> None:
    """Those that Delta lacks keep their values. Other readers see the same."""
    publish("a", 1, 2, **KINDS)
    schema = table.snapshot(DS).schema
    widened = {"nanoseconds": pa.timestamp("us"), "unsigned": pa.int64(), "large": pa.string()}
    assert {name: schema.field(name).type for name in widened} == widened
    ours = pa.Table.from_batches(table.scan(table.snapshot(DS), list(KINDS)))
    for theirs in (pa.table(raw(folder).scan()), raw(folder).to_pyarrow_table()):
        assert theirs.select(list(KINDS)).to_pydict() == ours.to_pydict()


# Publishing


def test_publish_makes_a_table_that_any_reader_reads(
    folder: Folder, table: DeltaTable, publish: Publish
) -> None:
    """One commit each, whatever the partition's name."""
    publish("o", 7)
    publish("a", 5, partition=HOSTILE)
    publish("b", 1, 2, partition=HOSTILE)
    written = raw(folder)
    assert (written.version(), written.metadata().partition_columns) == (2, ["ds"])
    run_id = of_plan("b", HOSTILE).run_id
    expected = [{"n": n, "run_id": run_id, "ds": HOSTILE} for n in (1, 2)]
    expected.append({"n": 7, "run_id": of_plan("o").run_id, "ds": DS})
    for found in (pa.table(written.scan()), written.to_pyarrow_table()):
        assert sorted(found.to_pylist(), key=lambda row: row["n"]) == expected
    assert written.to_pyarrow_table(filters=[("n", "=", 2)]).num_rows == 1
    # `RawTable.history` would wait for a server in this process.
    lines = folder.read_bytes(f"_delta_log/{2:020}.json").splitlines()
    (commit,) = (line["commitInfo"] for line in map(json.loads, lines) if "commitInfo" in line)
    told = {name: commit[f"batchllm.{name}"] for name in ("job", "partition", "plan-id")}
    assert told == {"job": "job", "partition": HOSTILE, "plan-id": "b"}


def test_a_commit_outlives_a_crash_of_the_machine(
    folder: Folder, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    for number, plan in enumerate("ab"):
        publish(plan, 1)
        log = folder.full_path("_delta_log")
        assert synced[-3:] == [f"{log}/{number:020}.json", log, folder.path]


# Schema rules


def test_rows_and_their_new_columns_are_one_commit(
    folder: Folder, table: DeltaTable, publish: Publish
) -> None:
    publish("a", 1)
    publish("b", 2, score=pa.array([0.5]), add_columns=True)
    assert raw(folder).version() == 1
    assert table.snapshot(DS).schema.names == ["n", "run_id", "ds", "score"]


def test_a_new_column_of_local_time_needs_a_feature(
    folder: Folder, table: DeltaTable, publish: Publish
) -> None:
    """Without it, delta-rs would leave a table that nobody can open."""
    publish("a", 1)
    at = pa.array([[1]], pa.list_(pa.timestamp("us")))
    with pytest.raises(TableError, match="timestampNtz"):
        publish("b", 2, at=at, add_columns=True)
    raw(folder).alter.add_feature(
        deltalake.TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
    )
    publish("b", 2, at=at, add_columns=True)
    assert table.published(DS) == of_plan("b")


def test_rules_for_new_rows_are_named(folder: Folder, publish: Publish) -> None:
    publish("a", 1)
    raw(folder).alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(TableError, match=r"delta\.constraints\.positive"):
        publish("b", -1)


def many_files(tmp_path: Path, plan_id: str, kind: pa.DataType | None = None) -> Path:
    """A folder of three files of rows."""
    folder = tmp_path / f"files-{plan_id}"
    folder.mkdir()
    for number in range(3):
        data = pa.table({"n": pa.array([number], kind or pa.int64())})
        published_file(folder / f"{number:05d}.parquet", data, of_plan(plan_id))
    return folder


def test_many_files_are_one_version(folder: Folder, table: DeltaTable, tmp_path: Path) -> None:
    for version, (plan_id, before) in enumerate((("a", None), ("b", of_plan("a")))):
        table.publish(of_plan(plan_id), many_files(tmp_path, plan_id), replaces=before)
        assert raw(folder).version() == version
        assert len(raw(folder).file_uris()) == 3
        assert raw(folder).to_pyarrow_table().num_rows == 3  # by another reader
        assert values(table) == [0, 1, 2]
        assert table.published(DS) == of_plan(plan_id)


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint32()])
def test_files_go_if_not_all_could_be_put(
    folder: Folder,
    table: DeltaTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: pa.DataType,
) -> None:
    data = many_files(tmp_path, "a", kind)
    monkeypatch.setattr("batchllm_operator.lake.data_files.MAX_GROUP_BYTES", 1)
    monkeypatch.setattr(table, "most_file_bytes", 1)
    put: list[str] = []

    def fail_at_last(real: Any, self: Folder, source: Path, name: str) -> None:
        if len(put) == 2:
            raise StorageError("no room")
        put.append(name)
        real(self, source, name)

    with wrapped((Folder, "publish_file"), fail_at_last), pytest.raises(StorageError):
        table.publish(of_plan("a"), data, replaces=None)
    assert len(put) == 2 and data_files(folder) == []
    table.publish(of_plan("a"), data, replaces=None)
    assert values(table) == [0, 1, 2] and len(data_files(folder)) == 3


def test_files_that_a_commit_was_tried_with_stay(
    folder: Folder, table: DeltaTable, publish: Publish, tmp_path: Path
) -> None:
    publish("a", 1, 2)
    first = set(data_files(folder))
    data = many_files(tmp_path, "b")
    with (
        meanwhile(lambda: publish("c", 7, replaces=of_plan("a"))),
        pytest.raises(ConflictError),
    ):
        table.publish(of_plan("b"), data, replaces=of_plan("a"))
    assert len(data_files(folder)) == 5 and first < set(data_files(folder))
    lost = failing(OSError("connection lost"))
    with wrapped((DeltaLog, "_write"), lost), pytest.raises(BatchLLMError):
        table.publish(of_plan("b"), data, replaces=of_plan("c"))
    assert len(data_files(folder)) == 8, "a version may yet come to refer to them"


def test_other_files_in_the_way_of_a_new_table(
    folder: Folder, table: DeltaTable, publish: Publish
) -> None:
    folder.write_bytes(f"_batchllm/ds={DS}/rows.parquet", b"ours")
    folder.write_bytes(f"ds={DS}/batchllm-0123.parquet", b"of an attempt that died")
    folder.write_bytes(f"ds={DS}/data.parquet", b"of a Parquet table")
    with pytest.raises(TableError, match=r"data\.parquet', but is no Delta table"):
        publish("a", 1)
    folder.remove(f"ds={DS}/data.parquet")
    publish("a", 1)
    assert values(table) == [1]


def test_a_vacuum_leaves_what_a_job_keeps_beside_the_data(
    folder: Folder, table: DeltaTable, publish: Publish
) -> None:
    folder.write_bytes("_batchllm/plan/rows.parquet", b"ours")
    publish("a", 1)
    publish("b", 2)
    gone = raw(folder).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(gone) == 1
    assert folder.read_bytes("_batchllm/plan/rows.parquet") == b"ours"
    assert values(table) == [2]


# Compare and swap


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], times: int = 1) -> Iterator[None]:
    """Do something just before the next commits, when the table has been looked at."""
    left = iter(range(times))

    def around(real: Any, *args: Any) -> Any:
        if next(left, None) is not None:
            action()
        return real(*args)

    with wrapped((DeltaLog, "commit"), around):
        yield


def test_a_commit_that_never_arrives(folder: Folder, publish: Publish) -> None:
    """On S3 the request may still be on its way; on local disk nothing is."""
    expected = StorageError if folder.is_local else CommitUnknownError
    refused = failing(OSError("out of order"))
    with wrapped((DeltaLog, "_write"), refused), pytest.raises(expected, match="out of order"):
        publish("a", 1)
    assert [name for name in folder.find() if "batchllm-" in name]  # a commit might refer to it


def publish_many(uri: str, partitions: list[str], plan: str, start: Any) -> None:
    """In a process of its own: publish each partition once, or find another's there."""
    table = DeltaTable(uri, "ds")
    start.wait()
    for partition in partitions:
        mine = of_plan(plan, partition)
        with contextlib.suppress(ConflictError):
            publish_rows(table, numbers(1, 2), mine, replaces=None)


def test_processes_that_race_for_partitions_of_a_new_table(
    folder: Folder, table: DeltaTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition is published once, by one of them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # from where processes load this file
    partitions = [f"{n:02}" for n in range(8)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    processes = []
    for plan in ("a", "b"):
        args = (folder.uri, partitions, plan, start)
        processes.append(context.Process(target=publish_many, args=args))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert table.partitions() == partitions
    for partition in partitions:
        assert table.published(partition) in (of_plan("a", partition), of_plan("b", partition))
        assert values(table, partition) == [1, 2]
    assert raw(folder).version() == len(partitions) - 1


# Places


@pytest.mark.parametrize("name", ["a b", "ü", "a+b", "a=b&c"])
def test_places_with_unusual_names(lake_uri: str, name: str) -> None:
    table = DeltaTable(f"{lake_uri}/{name}", "ds")
    publish_rows(table, numbers(1))
    raw(Folder.open(f"{lake_uri}/{name}")).create_checkpoint()
    publish_rows(table, numbers(2), of_plan("b"))
    assert values(table) == [2]


def test_places_that_delta_rs_takes_for_others(lake_uri: str) -> None:
    with pytest.raises(SpecError, match="can't lie at a place with '%'"):
        DeltaTable(f"{lake_uri}/a%20b", "ds")
