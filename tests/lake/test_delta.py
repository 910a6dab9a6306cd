"""What is Delta's own, `test_tables` has what all lake tables promise; S3: `full/`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable as RawTable
from deltalake import write_deltalake
from lake.test_tables import rows, values
from support.lake_tables import wrapped

from batchllm_operator.errors import (
    BatchLLMError,
    CommitUnknownError,
    ConflictError,
    SpecError,
    StorageError,
    TableError,
)
from batchllm_operator.lake import Publication
from batchllm_operator.lake.delta.log import DeltaLog
from batchllm_operator.lake.delta.table import DeltaTable
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage import Folder

DS = "2026-01-31"
INLINE_VECTOR = "^Bg9^0rr910000000000iXQKl0rr91000315c8Xg0@@Ma"  # of rows 3 and 7
HOSTILE = "a/../b ü%2F'\"=&?#\\:*|<>^{}~`[]"


@pytest.fixture
def folder(lake_uri: str) -> Folder:
    return Folder.open(lake_uri).child("table")


@pytest.fixture
def table(folder: Folder) -> DeltaTable:
    return DeltaTable(folder.uri, "ds")


def options(folder: Folder) -> dict[str, str]:
    return {} if folder.is_local else {"aws_conditional_put": "etag", "allow_http": "true"}


def raw(folder: Folder, version: int | None = None) -> RawTable:
    return RawTable(folder.uri, version=version, storage_options=options(folder))


def write(folder: Folder, rows: pa.Table, **how: Any) -> None:
    """What another writer does."""
    write_deltalake(
        folder.uri,
        rows,
        **{"mode": "append", "partition_by": "ds", "storage_options": options(folder)} | how,
    )


def numbers(*values: int, ds: Any = DS) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64()), "ds": pa.array([ds] * len(values))})


def by(plan_id: str, partition: str = DS) -> Publication:
    return Publication("job", partition, plan_id)


def outputs(folder: Path, publication: Publication, *values: int, **columns: Any) -> Path:
    """A file of rows to publish."""
    path = folder / f"{publication.plan_id}.parquet"
    own = {"n": pa.array(values, pa.int64()), **columns}
    run_ids = pa.array([publication.run_id] * len(values), pa.string())
    pq.write_table(pa.table({**own, "run_id": run_ids}), path)
    return path


# Snapshots


def test_a_snapshot_pins_the_partitions_files(folder: Folder, table: DeltaTable) -> None:
    write(folder, numbers(1, 2))
    write(folder, numbers(3))
    write(folder, numbers(4, ds="2026-02-01"))
    snapshot = table.snapshot(DS)
    assert snapshot.partition == DS
    assert snapshot.version == "delta:2"
    assert snapshot.num_rows == 3
    names = [file.name for file in snapshot.files]
    assert names == sorted(names)
    found = folder.find()
    assert all(file.size_bytes == found[file.name]["size"] for file in snapshot.files)
    assert snapshot.schema == pa.schema([("n", pa.int64()), ("ds", pa.string())])
    assert table.uri == f"delta+{folder.uri}"


def test_a_table_without_the_partition_column(folder: Folder, table: DeltaTable) -> None:
    write(folder, numbers(1), partition_by=None)
    with pytest.raises(TableError, match="isn't partitioned by 'ds', but by no column"):
        table.snapshot(DS)


@pytest.mark.parametrize(
    ("value", "kind", "text", "other"),
    [
        (date(2026, 1, 31), pa.date32(), "2026-01-31", "20260131"),
        (7, pa.int32(), "7", "07"),
        (-7, pa.int64(), "-7", "+7"),
    ],
)
def test_partitions_of_other_types_are_named_as_they_are_written(
    folder: Folder, table: DeltaTable, value: Any, kind: pa.DataType, text: str, other: str
) -> None:
    write(folder, pa.table({"n": [1, 2], "ds": pa.array([value, None], kind)}))
    assert table.partitions() == [text]
    assert rows(table, ["n", "ds"], partition=text) == [{"n": 1, "ds": value}]
    assert table.snapshot(other).files == ()
    assert table.snapshot("x").files == ()


def test_files_whose_rows_were_not_counted(folder: Folder, table: DeltaTable) -> None:
    write(folder, numbers(1, 2))
    edit_log(folder, 0, "add", lambda add: add.update(stats=None))
    assert [file.num_rows for file in table.snapshot(DS).files] == [2]


def edit_log(folder: Folder, version: int, action: str, edit: Callable[[Any], None]) -> None:
    name = f"_delta_log/{version:020}.json"
    lines = [json.loads(line) for line in folder.read_bytes(name).splitlines()]
    for line in lines:
        if action in line:
            edit(line[action])
    folder.write_bytes(name, "\n".join(map(json.dumps, lines)).encode())


def commit_info(folder: Folder, version: int) -> dict[str, Any]:
    """What the history says. `RawTable.history` would wait for a server in this process."""
    lines = folder.read_bytes(f"_delta_log/{version:020}.json").splitlines()
    (info,) = (found["commitInfo"] for line in lines if "commitInfo" in (found := json.loads(line)))
    return dict(info)


@pytest.mark.parametrize("path", ["../other/a.parquet", "/etc/passwd", "s3://other/a.parquet"])
def test_files_outside_of_the_table(folder: Folder, table: DeltaTable, path: str) -> None:
    write(folder, numbers(1))
    edit_log(folder, 0, "add", lambda add: add.update(path=path))
    with pytest.raises(TableError, match="outside of its folder"):
        table.snapshot(DS)


def require(folder: Folder, feature: str, **configuration: str) -> None:
    """Make the table one whose readers and writers must know a feature."""
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    edit_log(folder, 0, "protocol", lambda protocol: protocol.update(versions | features))
    edit_log(folder, 0, "metaData", lambda meta: meta.update(configuration=configuration))


@pytest.mark.parametrize("feature", ["columnMapping", "typeOfTomorrow"])
def test_features_that_cannot_be_read_are_named(
    folder: Folder, table: DeltaTable, feature: str
) -> None:
    write(folder, numbers(1))
    require(folder, feature, **{"delta.columnMapping.mode": "name"})
    with pytest.raises(TableError, match=feature):
        table.snapshot(DS)
    with pytest.raises(TableError, match=feature):
        table.published(DS)


def test_deletion_vectors_are_allowed_while_no_file_has_one(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), *range(10)), replaces=None)
    require(folder, "deletionVectors", **{"delta.enableDeletionVectors": "true"})
    table.publish(by("b"), outputs(tmp_path, by("b"), *range(9)), replaces=by("a"))
    assert values(table) == list(range(9))
    snapshot = table.snapshot(DS)
    vector = {"storageType": "i", "pathOrInlineDv": INLINE_VECTOR, "sizeInBytes": 36}
    edit_log(folder, 1, "add", lambda add: add.update(deletionVector=vector | {"cardinality": 2}))
    for read in (
        lambda: table.snapshot(DS),
        lambda: table.published(DS),
        lambda: list(DeltaTable(folder.uri, "ds").scan(snapshot, ["n"])),
    ):
        with pytest.raises(TableError, match="deletionVectors"):
            read()


def test_a_damaged_log(folder: Folder, table: DeltaTable) -> None:
    write(folder, numbers(1))
    folder.write_bytes(f"_delta_log/{0:020}.json", b'{"add": 1')
    with pytest.raises(TableError, match="its log is damaged"):
        table.snapshot(DS)


# Scans


def test_a_table_that_was_made_anew(folder: Folder, table: DeltaTable) -> None:
    write(folder, numbers(1, 2))
    snapshot = table.snapshot(DS)
    for name in folder.find():
        folder.remove(name)
    write(folder, numbers(3))
    with pytest.raises(TableError, match=r"is another one .* plan again"):
        list(DeltaTable(folder.uri, "ds").scan(snapshot, ["n"]))


@pytest.mark.parametrize(
    ("column", "op", "value"),
    [
        ("n", "==", 1),
        ("n", "in", (1, 2)),
        ("n", "<", 3),
        ("n", "<=", 2),
        ("s", "==", "b"),
        ("s", "<=", "b" * 50),
        ("x", "<", 2.5),
        ("x", "<=", 2),
        ("x", "in", (1, 0.5)),
    ],
)
def test_files_that_are_ruled_out_are_not_read(
    folder: Folder, table: DeltaTable, column: str, op: Any, value: Any
) -> None:
    write(folder, pa.table({"n": [1, 2], "s": ["a", "b"], "x": [0.5, 2.0], "ds": [DS] * 2}))
    kept = {file.name for file in table.snapshot(DS).files}
    write(folder, pa.table({"n": [3, 4], "s": ["c" * 99, "d"], "x": [3.5, 4], "ds": [DS] * 2}))
    for file in table.snapshot(DS).files:
        if file.name not in kept:
            folder.remove(file.name)
    term = FilterTerm(column=column, op=op, value=value)
    assert rows(table, ["n"], [term])
    with pytest.raises(TableError, match="vanished"):
        rows(table, ["n"])


@pytest.mark.parametrize(("op", "value"), [(">", 2), (">=", 3), ("==", 4)])
def test_our_own_files_are_ruled_out_too(
    folder: Folder, table: DeltaTable, tmp_path: Path, op: Any, value: int
) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), 1, 2), replaces=None)
    ours = table.snapshot(DS).files[0].name
    write(folder, raw_rows(3, 4))
    folder.remove(ours)
    assert rows(table, ["n"], [FilterTerm(column="n", op=op, value=value)])


def raw_rows(*numbers: int, ds: str = DS, run_id: str = "someone else") -> pa.Table:
    return pa.table({"n": numbers, "run_id": [run_id] * len(numbers), "ds": [ds] * len(numbers)})


@pytest.mark.parametrize("bound", ["minValues", "maxValues"])
def test_statistics_that_are_not_numbers(folder: Folder, table: DeltaTable, bound: str) -> None:
    """Spark has NaN as the greatest of all."""
    write(folder, pa.table({"x": [float("nan"), 9.0], "ds": [DS] * 2}))
    stats = {"numRecords": 2, "minValues": {"x": 9.0}, "maxValues": {"x": 9.0}}
    stats[bound] = {"x": "NaN"}
    edit_log(folder, 0, "add", lambda add: add.update(stats=json.dumps(stats)))
    for term in (FilterTerm(column="x", op=">", value=5.0), FilterTerm(column="x", value=9.0)):
        assert rows(table, ["x"], [term]) == [{"x": 9.0}]


def test_filters_of_types_whose_order_is_not_pythons(folder: Folder, table: DeltaTable) -> None:
    amounts = pa.array([Decimal("0.10")], pa.decimal128(10, 2))
    floats = pa.array([0.1], pa.float32())
    write(folder, pa.table({"n": [1], "amount": amounts, "x": floats, "ds": [DS]}))
    for column, op, value in (("amount", "==", 0.1), ("amount", "<", 0.2), ("x", ">", 0.05)):
        assert rows(table, ["n"], [FilterTerm(column=column, op=op, value=value)]) == [{"n": 1}]


def test_further_partition_columns(folder: Folder, table: DeltaTable) -> None:
    regions = pa.array([1, 2, None], pa.int32())
    data = pa.table({"n": [1, 2, 3], "region": regions, "ds": [DS] * 3})
    write(folder, data, partition_by=["region", "ds"])
    found = sorted(rows(table, ["n", "region"]), key=lambda row: row["n"])
    assert [row["region"] for row in found] == [1, 2, None]
    term = FilterTerm(column="region", op="==", value=2)
    assert rows(table, ["n"], [term]) == [{"n": 2}]


TYPES: dict[str, pa.Array] = {
    "text": pa.array(["ä", None]),
    "flag": pa.array([True, None]),
    "small": pa.array([1, None], pa.int8()),
    "real": pa.array([1.5, None], pa.float32()),
    "bytes": pa.array([b"\x00", None]),
    "amount": pa.array([Decimal("1.10"), None], pa.decimal128(10, 2)),
    "day": pa.array([date(2026, 1, 31), None]),
    "at": pa.array([datetime(2026, 1, 31, 12, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
    "local": pa.array([datetime(2026, 1, 31, 12), None], pa.timestamp("us")),
    "list": pa.array([[1, None], None], pa.list_(pa.int64())),
    "struct": pa.array([{"a": {"b": [1]}}, None]),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
}


OTHER_TYPES: Mapping[str, tuple[pa.Array, pa.DataType]] = {
    "large": (pa.array(["a"], pa.large_string()), pa.string()),
    "dictionary": (pa.array(["a"]).dictionary_encode(), pa.string()),
    "lists": (pa.array([["a"]], pa.large_list(pa.large_string())), pa.list_(pa.string())),
    "nanos": (pa.array([1_000], pa.timestamp("ns")), pa.timestamp("us")),
    "millis": (pa.array([1], pa.timestamp("ms", "Europe/Berlin")), pa.timestamp("us", "UTC")),
    "unsigned": (pa.array([255], pa.uint8()), pa.int16()),
    "fixed": (pa.array([b"abc"], pa.binary(3)), pa.binary()),
}


def test_types_have_deltas_words(folder: Folder, table: DeltaTable, tmp_path: Path) -> None:
    """Those that Delta lacks keep their values. Other readers see the same."""
    for name, (column, _) in OTHER_TYPES.items():
        TYPES[name] = pa.concat_arrays([column, pa.nulls(1, column.type)])
    expected = {
        name: OTHER_TYPES.get(name, (None, column.type))[1] for name, column in TYPES.items()
    }
    last = None
    for plan in ("a", "b"):
        data = outputs(tmp_path, by(plan), 1, 2, **TYPES)
        table.publish(by(plan), data, replaces=by(last) if last else None)
        last = plan
    schema = table.snapshot(DS).schema
    assert {name: schema.field(name).type for name in TYPES} == expected
    found = pa.Table.from_batches(table.scan(table.snapshot(DS), list(TYPES)))
    for name, kind in expected.items():
        assert found[name].to_pylist() == TYPES[name].cast(kind).to_pylist(), name
    assert pa.table(raw(folder).scan()).select(list(TYPES)).to_pylist() == found.to_pylist()
    assert raw(folder).to_pyarrow_table().select(list(TYPES)).to_pylist() == found.to_pylist()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1], pa.timestamp("ns")), "doesn't fit the table's type timestamp"),
        (pa.array([1.5], pa.float16()), "halffloat, which Delta has no type for"),
        (pa.array([2**63], pa.uint64()), "uint64, which Delta has no type for"),
        (pa.array([[1]], pa.list_(pa.time32("s"))), "which Delta has no type for"),
        (pa.nulls(1), "no row has a value in a new column"),
    ],
)
def test_values_that_delta_cannot_hold_are_refused(
    table: DeltaTable, tmp_path: Path, column: pa.Array, message: str
) -> None:
    with pytest.raises(TableError, match=message):
        table.publish(by("a"), outputs(tmp_path, by("a"), 1, x=column), replaces=None)
    assert table.partitions() == []


# Publishing


def test_publish_makes_a_table_that_any_reader_reads(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    """One commit each, whatever the partition's name."""
    other = by("o")
    table.publish(other, outputs(tmp_path, other, 7), replaces=None)
    first, second = by("a", HOSTILE), by("b", HOSTILE)
    table.publish(first, outputs(tmp_path, first, 5), replaces=None)
    table.publish(second, outputs(tmp_path, second, 1, 2), replaces=first)
    theirs = raw(folder)
    assert theirs.version() == 2
    assert theirs.metadata().partition_columns == ["ds"]
    expected = [{"n": n, "run_id": second.run_id, "ds": HOSTILE} for n in (1, 2)]
    expected.append({"n": 7, "run_id": other.run_id, "ds": DS})
    for found in (pa.table(theirs.scan()), theirs.to_pyarrow_table()):
        assert sorted(found.to_pylist(), key=lambda row: row["n"]) == expected
    assert theirs.to_pyarrow_table(filters=[("n", "=", 2)]).num_rows == 1
    commit = commit_info(folder, 2)
    told = {name: commit[f"batchllm.{name}"] for name in ("job", "partition", "plan-id")}
    assert told == {"job": "job", "partition": HOSTILE, "plan-id": "b"}


def test_a_commit_outlives_a_crash_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    folder = Folder.open(str(tmp_path / "table"))
    table = DeltaTable(folder.uri, "ds")
    for last, plan, number in ((None, "a", 0), ("a", "b", 1)):
        replaces = by(last) if last else None
        table.publish(by(plan), outputs(tmp_path, by(plan), 1), replaces=replaces)
        log = folder.full_path("_delta_log")
        assert synced[-3:] == [f"{log}/{number:020}.json", log, folder.path]


def test_an_empty_partition_makes_the_table_once(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    for _ in range(2):
        table.publish(by("a"), outputs(tmp_path, by("a")), replaces=None)
    assert (table.partitions(), table.published(DS), raw(folder).version()) == ([], None, 0)
    assert table.snapshot(DS).schema.names == ["n", "run_id", "ds"]


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [(pa.date32(), date(2026, 1, 31), DS, "31.1.2026"), (pa.int32(), 7, "7", "07")],
)
def test_a_table_with_typed_partitions_takes_outputs(
    folder: Folder, table: DeltaTable, tmp_path: Path, kind: Any, value: Any, good: str, bad: str
) -> None:
    run_id = by("a", good).run_id
    write(folder, pa.table({"n": [1], "run_id": [run_id], "ds": pa.array([value], kind)}))
    mine = by("b", good)
    table.publish(mine, outputs(tmp_path, mine, 5), replaces=by("a", good))
    assert rows(table, ["n", "ds"], partition=good) == [{"n": 5, "ds": value}]
    other = by("b", bad)
    with pytest.raises(TableError, match="isn't how such a value is written"):
        table.publish(other, outputs(tmp_path, other, 5), replaces=None)


def test_rows_are_copied_a_few_at_a_time_when_types_differ(
    table: DeltaTable, tmp_path: Path
) -> None:
    path, num_rows = tmp_path / "large.parquet", 20_000
    texts = pa.array([f"{n:05}" * 200 for n in range(num_rows)]).dictionary_encode()
    columns = {"n": pa.array(range(num_rows), pa.uint32()), "text": texts}
    run_ids = [by("a").run_id] * num_rows
    pq.write_table(pa.table({**columns, "run_id": run_ids}), path)
    table.publish(by("a"), path, replaces=None)
    batches = list(table.scan(table.snapshot(DS), ["n", "text"]))
    assert [n for batch in batches for n in batch["n"].to_pylist()] == list(range(num_rows))
    assert pa.chunked_array([batch["text"] for batch in batches]) == pa.chunked_array(
        [texts.cast(pa.string())]
    )


# Whose rows


@pytest.mark.parametrize(
    ("run_ids", "message"),
    [
        (["job/2026-01-31/a", "job/2026-01-31/b"], "several values"),
        (["job/2026-01-31/a", None], "several values"),
        ([None], "is None"),
        (["nightly"], "is 'nightly'"),
        (["job/2026-01-30/a"], "is 'job/2026-01-30/a'"),
        ([1], "is 1"),
    ],
)
def test_rows_of_others(
    folder: Folder, table: DeltaTable, tmp_path: Path, run_ids: list[Any], message: str
) -> None:
    n = list(range(len(run_ids)))
    kind = pa.int64() if 1 in run_ids else pa.string()
    write(folder, pa.table({"n": n, "run_id": pa.array(run_ids, kind), "ds": [DS] * len(n)}))
    with pytest.raises(TableError, match=f"no job of this package wrote.*{message}"):
        table.published(DS)
    with pytest.raises(TableError, match="no job of this package wrote"):
        table.publish(by("b"), outputs(tmp_path, by("b"), 3), replaces=None)
    assert values(table) == n


# Schema rules


def test_rows_and_their_new_columns_are_one_commit(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    data = outputs(tmp_path, by("b"), 2, score=pa.array([0.5]))
    table.publish(by("b"), data, replaces=by("a"), add_columns=True)
    assert raw(folder).version() == 1
    assert table.snapshot(DS).schema.names == ["n", "run_id", "ds", "score"]


def test_a_column_of_nulls_gets_the_tables_type(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    data = outputs(tmp_path, by("a"), 1, score=pa.array([0.5]))
    table.publish(by("a"), data, replaces=None)
    data = outputs(tmp_path, by("b"), 2, score=pa.nulls(1))
    table.publish(by("b"), data, replaces=by("a"))
    assert rows(table, ["n", "score"]) == [{"n": 2, "score": None}]
    assert pa.table(raw(folder).scan()).to_pylist()[0]["score"] is None


def test_a_new_column_of_local_time_needs_a_feature(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    """Without it, delta-rs would leave a table that nobody can open."""
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    data = outputs(tmp_path, by("b"), 2, at=pa.array([[1]], pa.list_(pa.timestamp("us"))))
    with pytest.raises(TableError, match="timestampNtz"):
        table.publish(by("b"), data, replaces=by("a"), add_columns=True)
    raw(folder).alter.add_feature(
        deltalake.TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
    )
    table.publish(by("b"), data, replaces=by("a"), add_columns=True)
    assert table.published(DS) == by("b")


def test_rules_for_new_rows_are_named(folder: Folder, table: DeltaTable, tmp_path: Path) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    raw(folder).alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(TableError, match=r"delta\.constraints\.positive"):
        table.publish(by("b"), outputs(tmp_path, by("b"), -1), replaces=by("a"))


def test_outputs_go_to_tables_partitioned_by_one_column(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    data = pa.table({"n": [1], "run_id": ["x"], "region": ["eu"], "ds": ["other"]})
    write(folder, data, partition_by=["ds", "region"])
    with pytest.raises(TableError, match="is partitioned by ds, region"):
        table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)


def test_rows_that_hold_the_partition_column(table: DeltaTable, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="partition column 'ds' themselves"):
        table.publish(by("a"), outputs(tmp_path, by("a"), 1, ds=pa.array([DS])), replaces=None)


def many_files(tmp_path: Path, publication: Publication) -> Path:
    """A folder of three files of rows."""
    folder = tmp_path / f"files-{publication.plan_id}"
    folder.mkdir()
    for number in range(3):
        outputs(tmp_path, publication, number).rename(folder / f"{number:05d}.parquet")
    return folder


def data_files(folder: Folder) -> list[str]:
    return [name for name in folder.find() if name.endswith(".parquet")]


def test_many_files_are_one_version(folder: Folder, table: DeltaTable, tmp_path: Path) -> None:
    for version, (plan_id, before) in enumerate((("a", None), ("b", by("a")))):
        table.publish(by(plan_id), many_files(tmp_path, by(plan_id)), replaces=before)
        assert raw(folder).version() == version
        assert len(raw(folder).file_uris()) == 3
        assert raw(folder).to_pyarrow_table().num_rows == 3  # by another reader
        assert values(table) == [0, 1, 2]
        assert table.published(DS) == by(plan_id)


@pytest.mark.parametrize("types_differ", [False, True])
def test_files_go_if_not_all_could_be_put(
    folder: Folder,
    table: DeltaTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    types_differ: bool,
) -> None:
    data = many_files(tmp_path, by("a"))
    if types_differ:
        monkeypatch.setattr("batchllm_operator.lake.data_files.MAX_GROUP_BYTES", 1)
        monkeypatch.setattr(table, "most_file_bytes", 1)
        for file in data.iterdir():
            found = pq.read_table(file)
            pq.write_table(found.set_column(0, "n", found["n"].cast(pa.uint32())), file)
    put: list[str] = []

    def fail_at_last(real: Any, self: Folder, source: Path, name: str) -> None:
        if len(put) == 2:
            raise StorageError("no room")
        put.append(name)
        real(self, source, name)

    with wrapped((Folder, "publish_file"), fail_at_last), pytest.raises(StorageError):
        table.publish(by("a"), data, replaces=None)
    assert len(put) == 2 and data_files(folder) == []
    table.publish(by("a"), data, replaces=None)
    assert values(table) == [0, 1, 2] and len(data_files(folder)) == 3


def test_files_that_a_commit_was_tried_with_stay(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    table.publish(by("a"), many_files(tmp_path, by("a")), replaces=None)
    first = set(data_files(folder))
    data = many_files(tmp_path, by("b"))
    is_first = True

    def come_first(real: Any, *args: Any) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            table.publish(by("c"), outputs(tmp_path, by("c"), 7), replaces=by("a"))
            assert len(data_files(folder)) == 7
        real(*args)

    with wrapped((DeltaLog, "_write"), come_first), pytest.raises(ConflictError):
        table.publish(by("b"), data, replaces=by("a"))
    assert len(data_files(folder)) == 7 and first < set(data_files(folder))

    def lose_the_answer(real: Any, *args: Any) -> None:
        raise OSError("connection lost")

    with wrapped((DeltaLog, "_write"), lose_the_answer), pytest.raises(BatchLLMError):
        table.publish(by("b"), data, replaces=by("c"))
    assert len(data_files(folder)) == 10, "a version may yet come to refer to them"


def test_other_files_in_the_way_of_a_new_table(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    data = outputs(tmp_path, by("a"), 1)
    folder.write_bytes(f"_batchllm/ds={DS}/rows.parquet", b"ours")
    folder.write_bytes(f"ds={DS}/batchllm-0123.parquet", b"of an attempt that died")
    folder.write_bytes(f"ds={DS}/data.parquet", b"of a Parquet table")
    with pytest.raises(TableError, match=r"data\.parquet', but is no Delta table"):
        table.publish(by("a"), data, replaces=None)
    folder.remove(f"ds={DS}/data.parquet")
    table.publish(by("a"), data, replaces=None)
    assert values(table) == [1]


def test_a_vacuum_leaves_what_a_job_keeps_beside_the_data(
    folder: Folder, table: DeltaTable, tmp_path: Path
) -> None:
    folder.write_bytes("_batchllm/plan/rows.parquet", b"ours")
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    table.publish(by("b"), outputs(tmp_path, by("b"), 2), replaces=by("a"))
    gone = raw(folder).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(gone) == 1
    assert folder.read_bytes("_batchllm/plan/rows.parquet") == b"ours"
    assert values(table) == [2]


# Compare and swap


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], times: int = 1
) -> None:
    """Do something just before the next commits, when the table has been looked at."""
    left = iter(range(times))
    commit = DeltaLog.commit

    def committing(self: DeltaLog, *args: Any) -> Any:
        if next(left, None) is not None:
            action()
        return commit(self, *args)

    monkeypatch.setattr(DeltaLog, "commit", committing)


def test_commits_to_other_partitions_are_no_conflict(
    folder: Folder, table: DeltaTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    meanwhile(monkeypatch, lambda: write(folder, raw_rows(9, ds="other")), times=3)
    table.publish(by("b"), outputs(tmp_path, by("b"), 2), replaces=by("a"))
    assert values(table) == [2]
    assert values(table, "other") == [9, 9, 9]
    ours = [name for name in folder.find() if "batchllm-" in name]
    assert len(ours) == 2  # put there once for all tries


def test_a_table_that_never_rests(
    folder: Folder, table: DeltaTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.lake.publishing._ATTEMPTS", 3)
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    meanwhile(monkeypatch, lambda: write(folder, raw_rows(9, ds="other")), times=99)
    with pytest.raises(StorageError, match="another commit to the table came first"):
        table.publish(by("b"), outputs(tmp_path, by("b"), 2), replaces=by("a"))
    assert table.published(DS) == by("a")


def test_a_schema_that_changes_meanwhile(
    folder: Folder, table: DeltaTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    more = raw_rows(9, ds="other").append_column("score", pa.array(["high"]))
    meanwhile(monkeypatch, lambda: write(folder, more, schema_mode="merge"))
    data = outputs(tmp_path, by("b"), 2, score=pa.array([0.5]))
    with pytest.raises(TableError, match="'score' holds string"):
        table.publish(by("b"), data, replaces=by("a"), add_columns=True)
    assert values(table) == [1]


def test_a_commit_that_never_arrives(
    folder: Folder, table: DeltaTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On S3 the request may still be on its way; on local disk nothing is."""

    def failing(self: DeltaLog, *args: Any) -> None:
        raise OSError("out of order")

    monkeypatch.setattr(DeltaLog, "_write", failing)
    expected = StorageError if folder.is_local else CommitUnknownError
    with pytest.raises(expected, match="out of order"):
        table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    assert [name for name in folder.find() if "batchllm-" in name]  # a commit might refer to it


# Races


def publish_many(uri: str, partitions: list[str], plan: str, folder: str, start: Any) -> None:
    """In a process of its own: publish each partition once, or find another's there."""
    table = DeltaTable(uri, "ds")
    start.wait()
    for partition in partitions:
        mine = by(plan, partition)
        with contextlib.suppress(ConflictError):
            table.publish(mine, outputs(Path(folder), mine, 1, 2), replaces=None)


def test_processes_that_race_for_partitions_of_a_new_table(
    folder: Folder, table: DeltaTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition is published once, by one of them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # from where processes load this file
    partitions = [f"{n:02}" for n in range(8)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    processes = []
    for plan in ("a", "b"):
        (tmp_path / plan).mkdir()
        args = (folder.uri, partitions, plan, str(tmp_path / plan), start)
        processes.append(context.Process(target=publish_many, args=args))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert table.partitions() == partitions
    for partition in partitions:
        found = table.published(partition)
        assert found is not None and found.plan_id in ("a", "b")
        assert values(table, partition) == [1, 2]
    assert raw(folder).version() == len(partitions) - 1


# Places


@pytest.mark.parametrize("name", ["a b", "ü", "a+b", "a=b&c"])
def test_places_with_unusual_names(lake_uri: str, tmp_path: Path, name: str) -> None:
    table = DeltaTable(f"{lake_uri}/{name}", "ds")
    table.publish(by("a"), outputs(tmp_path, by("a"), 1), replaces=None)
    raw(Folder.open(f"{lake_uri}/{name}")).create_checkpoint()
    table.publish(by("b"), outputs(tmp_path, by("b"), 2), replaces=by("a"))
    assert values(table) == [2]


def test_places_that_delta_rs_takes_for_others(lake_uri: str) -> None:
    with pytest.raises(SpecError, match="can't lie at a place with '%'"):
        DeltaTable(f"{lake_uri}/a%20b", "ds")


def test_a_partition_column_of_times_is_shown_with_the_nearest(folder: Folder) -> None:
    data = pa.table({"n": [1], "at": [datetime(2026, 1, 31, 5, tzinfo=UTC)]})
    write(folder, data, partition_by="at")
    with pytest.raises(
        TableError, match=r"holds timestamp.* can't name a partition; .* are '2026-01-31 05:00:00"
    ):
        DeltaTable(folder.uri, "at").snapshot("2026-01-31")
