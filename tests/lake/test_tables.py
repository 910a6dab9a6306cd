"""What every lake table promises, in each format. On S3: `full/test_tables_on_s3.py`."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter
from pydantic_core import to_json
from support.lake_tables import (
    DS,
    HIVE_NULL,
    DeltaLake,
    Lake,
    failing,
    losing,
    of_plan,
    open_lake,
    publish,
    wrapped,
)

from batchllm_operator.errors import CommitUnknownError, ConflictError, StorageError, TableError
from batchllm_operator.lake import FilePart, LakeTable, in_order, open_table
from batchllm_operator.lake.parquet.table import ParquetTable
from batchllm_operator.lake.schema import plain_type
from batchllm_operator.spec import Comparison, FilterTerm


@pytest.fixture
def table(lake: Lake) -> LakeTable:
    return open_lake(lake)


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def rows(
    table: LakeTable,
    columns: Sequence[str] = ("n",),
    conditions: Sequence[FilterTerm] = (),
    partition: str = DS,
) -> list[dict[str, Any]]:
    batches = table.scan(table.snapshot(partition), columns, conditions)
    return [row for batch in batches for row in batch.to_pylist()]


def values(table: LakeTable, partition: str = DS) -> list[int]:
    return [row["n"] for row in rows(table, partition=partition)]


# Reading


def test_a_table_that_is_not_there(table: LakeTable) -> None:
    assert table.partitions() == []
    assert table.published(DS) is None
    with pytest.raises(TableError, match="table"):
        table.snapshot(DS)
    table.check_outputs(DS, numbers().schema)
    assert table.partitions() == []


def test_a_snapshot_pins_the_partitions_files(lake: Lake, table: LakeTable) -> None:
    for partition, values in ((DS, (1, 2)), (DS, (3,)), ("2026-02-01", (4,))):
        lake.append(partition, numbers(*values))
    snapshot = table.snapshot(DS)
    assert (snapshot.partition, snapshot.num_rows, len(snapshot.files)) == (DS, 3, 2)
    assert snapshot.schema == pa.schema([("n", pa.int64()), ("ds", pa.string())])
    found = {name: details["size"] for name, details in lake.folder.find().items()}
    for file in snapshot.files:
        (name,) = (name for name in found if name.endswith(file.name))
        assert file.size_bytes == found[name]


def test_a_table_that_is_not_partitioned_by_the_column(lake: Lake) -> None:
    lake.append(DS, numbers(1))
    other = open_table(lake.address, "n")
    with pytest.raises(TableError, match="isn't partitioned by 'n'"):
        other.snapshot("1")
    if lake.has_versions:
        with pytest.raises(TableError, match="partitioned by"):
            publish(other, pa.table({"x": [1]}), replaces=None)


def test_columns_come_as_they_were_asked_for(lake: Lake, table: LakeTable) -> None:
    lake.append(DS, pa.table({"a": [1], "b": ["x"], "c": [2.5]}))
    [batch] = table.scan(table.snapshot(DS), ["ds", "b"])
    assert batch.to_pylist() == [{"ds": DS, "b": "x"}]
    assert batch.schema.names == ["ds", "b"]
    assert sum(each.num_rows for each in table.scan(table.snapshot(DS), [])) == 1


def test_an_absent_partition_has_a_schema_and_no_rows(lake: Lake, table: LakeTable) -> None:
    lake.append("2026-01-01", numbers(1))
    snapshot = table.snapshot(DS)
    assert (snapshot.files, snapshot.num_rows) == ((), 0)
    assert snapshot.schema.names == ["n", "ds"]
    assert list(table.scan(snapshot, ["n"])) == []
    with pytest.raises(TableError, match="no column 'm'"):
        list(table.scan(snapshot, ["m"]))


def test_rows_keep_the_order_of_files_and_of_rows_in_them(lake: Lake, table: LakeTable) -> None:
    for start in (0, 10_000):
        lake.append(DS, numbers(*range(start, start + 10_000)))
    found = values(table)
    assert found == values(table)
    assert sorted(found) == list(range(20_000))
    assert found[:10_000] == sorted(found[:10_000])


def test_another_partitions_files_are_not_read(lake: Lake, table: LakeTable) -> None:
    lake.append("2026-01-01", numbers(1))
    others = lake.data_files()
    lake.append(DS, numbers(2))
    for path in others:
        lake.folder.remove(path)
    assert values(table) == [2]


FILTERS: list[tuple[Any, Any, list[int]]] = [
    ("==", 2, [2]),
    ("!=", 2, [1, 3]),
    ("<", 2, [1]),
    ("<=", 2, [1, 2]),
    (">", 2, [3]),
    (">=", 2, [2, 3]),
    ("in", (1, 3, 9), [1, 3]),
    ("not in", (1, 9), [2, 3]),
    ("in", (), []),
    ("not in", (), [1, 2, 3]),
    (">", 1.5, [2, 3]),
    ("<", 1.5, [1]),
    ("==", 2.5, []),
]


def test_filters(lake: Lake, table: LakeTable) -> None:
    lake.append(DS, pa.table({"n": [1, 2, 3, None], "m": [0, 0, 0, 0]}))
    for op, value, expected in FILTERS:
        condition = FilterTerm(column="n", op=op, value=value)
        found = [row["n"] for row in rows(table, ["n", "m"], [condition])]
        assert [each for each in found if each is not None] == expected, condition
        # As Arrow has it, whatever a format would say.
        assert (None in found) == (op == "not in"), condition


def test_filters_compare_values_in_the_type_of_the_column(lake: Lake, table: LakeTable) -> None:
    times = [datetime.datetime(2026, 1, day, 12, 0, 0, 250) for day in (1, 2, 3)]
    columns = {
        "n": [1, 2, 3, 4],
        "date": pa.array([*(each.date() for each in times), None], pa.date32()),
        "at": pa.array([*times, None], pa.timestamp("us")),
        "utc": pa.array([*times, None], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal("0.10"), Decimal("0.20"), Decimal("1.50"), None]),
    }
    lake.append(DS, pa.table(columns))
    for column, op, value, expected in (
        ("date", "<=", "2026-01-02", [1, 2]),
        ("date", "in", ("2026-01-02", "2027-01-01"), [2]),
        ("at", ">=", "2026-01-02", [2, 3]),
        ("at", "==", "2026-01-02T12:00:00.000250", [2]),
        ("utc", "<", "2026-01-02T13:00:00.000250+01:00", [1]),
        ("utc", "in", ("2026-01-02 12:00:00.000250",), [2]),
        ("price", "==", 0.1, [1]),
        ("price", ">", "0.2", [3]),
        ("price", "in", (1.5, 2), [3]),
        ("price", "!=", 1.555, [1, 2, 3]),
        ("at", "is null", None, [4]),
        ("price", "is not null", None, [1, 2, 3]),
    ):
        condition = FilterTerm(column=column, op=op, value=value)
        assert [row["n"] for row in rows(table, ["n"], [condition])] == expected, condition
    first, late, none = (
        Comparison(column="n", value=1),
        Comparison(column="date", op=">", value="2026-01-02"),
        Comparison(column="price", op="is null"),
    )
    for comparisons, expected in (((first, late), [1, 3]), ((first, none), [1, 4])):
        condition = FilterTerm(any=comparisons)
        assert [row["n"] for row in rows(table, ["n"], [condition])] == expected
        both = [condition, FilterTerm(column="n", op=">", value=1)]
        assert [row["n"] for row in rows(table, ["n"], both)] == expected[1:]


def test_values_that_are_compared_with_rows_but_not_with_bounds(
    lake: Lake, table: LakeTable
) -> None:
    dates = [datetime.date(2026, 1, day) for day in (1, 2, 3)]
    lake.append(DS, pa.table({"n": [1, 2, 2**53 + 1], "date": dates}))
    for column, value in (("n", ("2", "9")), ("date", ("2026-01-02",))):
        condition = FilterTerm(column=column, op="in", value=value)
        assert rows(table, ["n"], [condition]) == [{"n": 2}]
    condition = FilterTerm(column="n", op=">", value=0.5)
    with pytest.raises(TableError, match="can't be read: Integer value"):
        rows(table, ["n"], [condition])


def test_conditions_on_columns_that_are_not_read(lake: Lake, table: LakeTable) -> None:
    data = {"n": [1, 2, 3], "lang": ["en", "de", "en"], "ok": [True, True, False]}
    lake.append(DS, pa.table(data))
    conditions = [FilterTerm(column="lang", value="en"), FilterTerm(column="ok", value=True)]
    assert rows(table, ["n"], conditions) == [{"n": 1}]
    with pytest.raises(TableError, match="no filter column 'nothing'"):
        rows(table, ["n"], [FilterTerm(column="nothing", value=1)])
    with pytest.raises(TableError, match="no column 'nothing'"):
        rows(table, ["nothing"])
    for value in ("two", 2**70):  # a spec with such a number is refused, a stored one might have it
        condition = FilterTerm.model_construct(column="n", op="==", value=value)
        with pytest.raises(TableError, match="table"):
            rows(table, ["n"], [condition])


UNCOMPARABLE: list[tuple[Any, str, Any]] = [
    ([[1]], ">", 5),
    ([[1]], "in", (1, 2)),
    ([{"a": 1}], "==", "x"),
    ([b"x"], "<", 1.5),
    (["x"], ">=", 5),
    ([1], "==", "x"),
    ([True], "==", 1),
    ([datetime.date(2026, 1, 1)], "==", "2026-13-01"),
    ([datetime.datetime(2026, 1, 1)], ">", "2026-01-01T00:00:00Z"),
    ([Decimal("1.5")], "in", ("1,5",)),
    ([Decimal("1.5")], "==", True),
]


def test_a_condition_that_a_type_does_not_allow_says_what_to_do(
    lake: Lake, table: LakeTable
) -> None:
    data = {f"c{number}": values for number, (values, _, _) in enumerate(UNCOMPARABLE)}
    lake.append(DS, pa.table({"n": [1], **data}))
    for number, (_, op, value) in enumerate(UNCOMPARABLE):
        condition = FilterTerm.model_construct(column=f"c{number}", op=op, value=value)
        with pytest.raises(TableError, match=rf"input.filter: .*: column 'c{number}' ") as refused:
            rows(table, ["n"], [condition])
        message = str(refused.value)
        assert "add, in a view of the input, a column" in message
        assert "kernel" not in message and "Array type" not in message


RULED_OUT: list[tuple[str, Any, Any]] = [
    *(("n", "==", 1), ("n", "in", (1, 2)), ("n", "<", 3), ("n", "<=", 2)),
    *(("s", "==", "b"), ("s", "<=", "b" * 20), ("ok", "==", False)),
    *(("x", "<", 2.5), ("x", "<=", 2), ("x", "in", (1, 0.5))),
    ("d", "<=", "2026-01-31"),
]
"""Conditions that rows of a second file can't meet."""


def test_a_file_that_its_statistics_rule_out_is_not_read(lake: Lake, table: LakeTable) -> None:
    """By statistics of another writer, and by ours."""
    if not lake.has_versions:
        pytest.skip("plain Parquet has statistics in the files' own footers")
    first = {"n": [1, 2], "s": ["a", "b"], "x": [0.5, 2.0], "ok": [False, False]}
    second = {"n": [3, 4], "s": ["c" * 99, "d"], "x": [3.5, 4.0], "ok": [True, True]}
    first["d"], second["d"] = ([datetime.date(2026, month, 1)] * 2 for month in (1, 2))
    lake.append(DS, pa.table({**first, "run_id": ["theirs"] * 2}))
    kept = set(lake.data_files())
    lake.append(DS, pa.table({**second, "run_id": ["theirs"] * 2}))
    publish(table, pa.table(second), of_plan(partition="ours"))
    for path in set(lake.data_files()) - kept:
        lake.folder.remove(path)
    for column, op, value in RULED_OUT:
        condition = FilterTerm(column=column, op=op, value=value)
        assert rows(table, ["n"], [condition]), condition
        if column == "n":  # not every format has bounds of other types
            assert rows(table, ["n"], [condition], "ours") == [], condition
    for partition in (DS, "ours"):
        with pytest.raises(TableError, match="vanished"):
            rows(table, ["n"], partition=partition)


def test_a_row_group_that_its_statistics_rule_out_is_not_decoded(
    lake: Lake, table: LakeTable
) -> None:
    lake.append(DS, numbers(*range(1000)))
    condition = FilterTerm(column="n", op="<", value=0)
    with wrapped((pq.ParquetFile, "iter_batches"), lambda real, *args, **kwargs: pytest.fail()):
        assert rows(table, ["n"], [condition]) == []


# Versions


def test_a_later_write_is_not_seen_or_is_an_error(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(1, 2))
    snapshot = table.snapshot(DS)
    assert table.snapshot(DS) == snapshot
    publish(open_lake(lake), numbers(7), of_plan("p2"))
    assert table.snapshot(DS).version != snapshot.version
    if lake.has_versions:
        assert [row["n"] for b in table.scan(snapshot, ["n"]) for row in b.to_pylist()] == [1, 2]
    else:
        with pytest.raises((StorageError, TableError), match=DS):
            list(table.scan(snapshot, ["n"]))
    assert values(table) == [7]


def test_a_write_while_rows_are_read_is_not_seen_or_is_an_error(
    lake: Lake, table: LakeTable
) -> None:
    lake.append(DS, numbers(*range(5000)))
    snapshot = table.snapshot(DS)
    batches = table.scan(snapshot, ["n"])
    found = next(batches).num_rows
    lake.append(DS, numbers(1))
    if lake.has_versions:
        assert found + sum(batch.num_rows for batch in batches) == 5000
    else:
        with pytest.raises(StorageError, match="changed while it was read"):
            list(batches)


def test_a_vanished_snapshot(lake: Lake, table: LakeTable) -> None:
    """It is read as it was, as long as its files are there, or refused."""
    if not lake.has_versions:
        pytest.skip("plain Parquet has no versions")
    publish(table, numbers(1))
    snapshot = table.snapshot(DS)
    publish(table, numbers(2), of_plan("p2"))
    lake.forget()
    try:
        found = pa.Table.from_batches(open_lake(lake).scan(snapshot, ["n"]))
    except TableError as error:
        assert f"{snapshot.version} is gone" in str(error)
    else:
        assert found["n"].to_pylist() == [1]


def test_vanished_files(lake: Lake, table: LakeTable) -> None:
    lake.append(DS, numbers(1))
    snapshot = table.snapshot(DS)
    for path in lake.data_files():
        lake.folder.remove(path)
    with pytest.raises(TableError, match=f"(?s)'{DS}'.*(vanished|is gone)"):
        list(table.scan(snapshot, ["n"]))


# Values

AWKWARD = [
    "a/b",
    "007",
    "a b",
    "naïve-表",
    "50%",
    "%2F",
    "..",
    ".",
    "a=b",
    "x+&y?z#",
    "'\"",
    "\\:*|<>^{}~`[]",
]


def test_any_partition_value(lake: Lake, table: LakeTable) -> None:
    for first, plan_id in enumerate(("p1", "p2")):
        for number, value in enumerate(AWKWARD, 100 * first):
            whose = of_plan(plan_id, value)
            publish(table, numbers(number), whose)
            assert table.published(value) == whose
    assert table.partitions() == in_order(AWKWARD)
    neighbours = {f"{quote(value)}!": -number for number, value in enumerate(AWKWARD)}
    for neighbour, number in neighbours.items():  # of another program
        lake.append(neighbour, pa.table({"n": [number], "run_id": ["theirs"]}))
    assert table.partitions() == in_order([*AWKWARD, *neighbours])
    expected = {value: number for number, value in enumerate(AWKWARD, 100)} | neighbours
    for value, number in expected.items():
        assert rows(table, ["n", "ds"], partition=value) == [{"n": number, "ds": value}]


def test_a_partition_without_a_name(table: LakeTable) -> None:
    """It would be null in one format, and nobody's rows in the others."""
    for _ in range(2):
        with pytest.raises(TableError, match="needs a name"):
            publish(table, numbers(1), of_plan(partition=""))
        publish(table, numbers(1))
    assert table.partitions() == [DS]


def test_rows_without_a_partition_value_are_in_none(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(1))
    lake.append(None, pa.table({"n": [2], "run_id": ["theirs"]}))
    assert table.partitions() == [DS]
    assert values(table) == [1]
    for name in (HIVE_NULL, "None", "null"):
        assert table.snapshot(name).files == ()


def test_the_name_that_folders_have_for_null(lake: Lake, table: LakeTable) -> None:
    """Where partitions are known by their folders, nobody could tell it from null."""
    if lake.has_versions:
        publish(table, numbers(1), of_plan(partition=HIVE_NULL))
        assert rows(table, ["n", "ds"], partition=HIVE_NULL) == [{"n": 1, "ds": HIVE_NULL}]
        assert table.partitions() == [HIVE_NULL]
    else:
        with pytest.raises(TableError, match="means null"):
            publish(table, numbers(1), of_plan(partition=HIVE_NULL))
        assert lake.data_files() == []


@pytest.mark.parametrize(
    ("value", "kind", "name", "others"),
    [
        (datetime.date(2026, 1, 31), pa.date32(), DS, ("20260131", "2026-02-30")),
        (7, pa.int32(), "7", ("07", "+7", str(2**31))),
        (-8, pa.int64(), "-8", ("-0", "- 8", str(2**63))),
    ],
)
def test_partition_columns_of_other_types(
    lake: Lake,
    table: LakeTable,
    value: Any,
    kind: pa.DataType,
    name: str,
    others: Sequence[str],
) -> None:
    """A value has one name, as it is written. Read and replaced where others made the table."""
    if not lake.has_versions:
        pytest.skip("folders of plain Parquet hold text")
    lake.append(pa.scalar(value, kind), pa.table({"n": [1], "run_id": [of_plan("a", name).run_id]}))
    lake.append(pa.scalar(None, kind), pa.table({"n": [2], "run_id": ["theirs"]}))
    assert table.partitions() == [name]
    assert rows(table, ["n", "ds"], partition=name) == [{"n": 1, "ds": value}]
    for other in ("tomorrow", *others):
        with pytest.raises(TableError, match=re.escape(repr(other))):
            publish(table, numbers(5), of_plan(partition=other), replaces=None)
    publish(table, numbers(5), of_plan("b", name))
    assert rows(table, ["n", "ds"], partition=name) == [{"n": 5, "ds": value}]
    snapshot = table.snapshot(name)  # as Spark's tasks read it
    for file in snapshot.files:
        part = TypeAdapter(FilePart).validate_json(to_json(FilePart(file)))
        [batch] = open_lake(lake).scan(replace(snapshot, files=()), ["n", "ds"], part=part)
        assert batch.to_pylist() == [{"n": 5, "ds": value}]


def test_a_partition_column_of_times_is_refused_with_the_nearest_names(lake: Lake) -> None:
    if not isinstance(lake, DeltaLake):
        pytest.skip("folders of plain Parquet hold text, and Iceberg's times name days")
    lake.append(pa.scalar(datetime.datetime(2026, 1, 31, 5), pa.timestamp("us")), numbers(1))
    refusal = "holds timestamp.* can't name a partition; .* are '2026-01-31 05:00:00'"
    with pytest.raises(TableError, match=refusal):
        open_lake(lake).snapshot(DS)


@pytest.mark.parametrize("column", ["a b", "a/b", "../x", "ä", "a=b", "a%20b", "_ds", "DS"])
def test_any_partition_column(lake: Lake, column: str) -> None:
    table = open_table(lake.address, column)
    publish(table, numbers(7))
    assert rows(table, ["n", column]) == [{"n": 7, column: DS}]
    assert (table.partitions(), table.published(DS)) == ([DS], of_plan())


KINDS: dict[str, pa.Array] = {
    "nested": pa.array([{"a": [1, 2], "b": {"c": "x"}}, None]),
    "list": pa.array([["a", None], []]),
    "structs": pa.array([[{"x": 1}], None]),
    "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array(["x", None]).dictionary_encode(),
    "large": pa.array(["x" * 100_000, ""], pa.large_string()),
    "binary": pa.array([b"\0\xff", None]),
    "decimal": pa.array([Decimal("123456.78"), None], pa.decimal128(10, 2)),
    "date": pa.array([datetime.date(2026, 1, 1), None]),
    "timestamp": pa.array([datetime.datetime(2026, 1, 1, 1, 2, 3, 456), None]),
    "utc": pa.array([datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), None]),
    "nanoseconds": pa.array([1_000, None], pa.timestamp("ns")),
    "float": pa.array([1.5, None], pa.float32()),
    "bool": pa.array([True, None]),
    "small": pa.array([-5, None], pa.int8()),
    "unsigned": pa.array([2**32 - 1, None], pa.uint32()),
}


def same(value: Any) -> Any:
    """Values as Python has them, whatever the unit: pandas' timestamps are equal to Python's."""
    return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value


@pytest.mark.filterwarnings("ignore:Discarding nonzero nanoseconds")
def test_values_of_all_kinds_come_back(table: LakeTable) -> None:
    publish(table, pa.table({"n": [1, 2], **KINDS}))
    found = rows(table, list(KINDS))
    for kind, column in KINDS.items():
        assert [same(row[kind]) for row in found] == [same(each) for each in column.to_pylist()]
    publish(table, pa.table({"n": [3, 4], **KINDS}), of_plan("p2"))
    publish(table, pa.table({"n": [3, 4], **KINDS}), of_plan(partition="other"))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1], pa.timestamp("ns")), "'x' has a value that doesn't fit the table's type"),
        (pa.array([2**63], pa.uint64()), "'x' has a value that doesn't fit the table's type int64"),
        (pa.array([[2**63]], pa.list_(pa.uint64())), "doesn't fit the table's type list<.* int64>"),
        (pa.array([10**40], pa.decimal256(50, 0)), r"doesn't fit .* decimal128\(38, 0\)"),
        (pa.nulls(1), "no row has a value in a new column, 'x'"),
    ],
)
def test_values_that_a_format_cannot_hold_are_refused(
    lake: Lake, table: LakeTable, column: pa.Array, message: str
) -> None:
    if not lake.has_versions:
        pytest.skip("plain Parquet holds what Arrow holds")
    with pytest.raises(TableError, match=message):
        publish(table, pa.table({"n": [1], "x": column}))
    assert lake.data_files() == []


def test_timestamps_as_spark_writes_them(lake: Lake, table: LakeTable) -> None:
    """INT96 counts from days that nanoseconds since 1970 don't reach."""
    years = [datetime.datetime(year, 12, 31, 23, 59, 59) for year in (1, 1500, 2026, 9999)]
    at = pa.array(years, pa.timestamp("us"))
    lake.append(DS, pa.table({"at": at, "s": pa.StructArray.from_arrays([at], ["at"])}))
    [path] = lake.data_files()
    data = pq.read_table(io.BytesIO(lake.folder.read_bytes(path)))
    file = io.BytesIO()
    pq.write_table(data, file, use_deprecated_int96_timestamps=True)
    lake.folder.write_bytes(path, file.getvalue())
    assert [row["at"] for row in rows(table, ["at"])] == years
    assert [row["s"]["at"] for row in rows(table, ["s"])] == years


def test_column_names(table: LakeTable) -> None:
    names = ["a b", "a.b", "ü", "1st", "select", "a/b", "Ab"]
    columns = {name: [2 * number, 2 * number + 1] for number, name in enumerate(names)}
    publish(table, pa.table({**columns, "n": [3, 4]}))
    for name, (first, second) in columns.items():
        assert rows(table, [name]) == [{name: first}, {name: second}]
        assert rows(table, ["n"], [FilterTerm(column=name, value=second)]) == [{"n": 4}]


# Publishing


def test_publish_replaces_its_partition_and_no_other(lake: Lake, table: LakeTable) -> None:
    assert table.published(DS) is None
    publish(table, numbers(1, 2, 3))
    publish(table, numbers(9), of_plan(partition="2026-02-01"))
    publish(table, numbers(4), of_plan("p2"))
    assert values(open_lake(lake)) == [4]
    assert table.published(DS) == of_plan("p2")
    assert values(table, "2026-02-01") == [9]
    assert table.partitions() == [DS, "2026-02-01"]


def test_publishing_again_changes_nothing(lake: Lake, table: LakeTable) -> None:
    for seen in (None, None, of_plan()):
        publish(table, numbers(1, 2), replaces=seen)
        version = table.snapshot(DS).version
        assert len(lake.data_files()) == 1
    assert values(table) == [1, 2]
    publish(table, numbers(1, 2), replaces=of_plan("p0"))
    assert table.snapshot(DS).version == version


def test_an_empty_partition_is_published_once(table: LakeTable) -> None:
    for plan_id in ("p1", "p3"):
        versions = set()
        for _ in range(2):
            publish(table, numbers(), of_plan(plan_id))
            assert rows(table) == []
            versions.add(table.snapshot(DS).version)
        assert len(versions) == 1
        publish(table, numbers(1), of_plan("p2"))
        assert values(table) == [1]


@pytest.mark.parametrize("seen", [None, of_plan("p0")])
def test_somebody_else_has_published(lake: Lake, table: LakeTable, seen: Any) -> None:
    if seen:
        publish(table, numbers(0), seen)
    publish(table, numbers(1), of_plan("p1"), replaces=seen)
    files = lake.data_files()
    with pytest.raises(ConflictError, match="p1"):
        publish(open_lake(lake), numbers(2), of_plan("p2"), replaces=seen)
    assert (values(table), table.published(DS)) == ([1], of_plan("p1"))
    assert lake.data_files() == files


def test_nothing_is_there_where_something_was(table: LakeTable) -> None:
    publish(table, numbers(1), of_plan(partition="other"))
    with pytest.raises(ConflictError, match="holds nothing where"):
        publish(table, numbers(2), of_plan("p2"), replaces=of_plan("p1"))
    assert values(table) == []


def first_call(action: Callable[[], None]) -> Callable[..., Any]:
    """Around a function: the action comes before its first call."""
    done: list[int] = []

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(1)
            action()
        return real(*args, **kwargs)

    return around


@pytest.mark.parametrize("seen", [None, of_plan("p0")])
def test_two_publishers_race(lake: Lake, table: LakeTable, seen: Any) -> None:
    """The winner comes between the loser's look at the table and its commit."""
    if seen:
        publish(table, numbers(0), seen)
    if lake.address.startswith("/") and not lake.has_versions:
        pytest.skip("the lock keeps the winner out until the loser has won")

    def win() -> None:
        publish(open_lake(lake), numbers(1), of_plan("winner"), replaces=seen)

    with wrapped(lake.commit, first_call(win)), pytest.raises(ConflictError, match="winner"):
        publish(table, numbers(2), of_plan("loser"), replaces=seen)
    assert (values(table), table.published(DS)) == ([1], of_plan("winner"))


@pytest.mark.parametrize("seen", [None, of_plan("p0")])
def test_another_program_adds_rows_meanwhile(lake: Lake, table: LakeTable, seen: Any) -> None:
    if not lake.has_versions:
        pytest.skip("plain Parquet has no commits that other programs take part in")
    publish(table, numbers(0), seen or of_plan(partition="other"))
    theirs = pa.table({"n": [9], "run_id": ["theirs"]})
    with (
        wrapped(lake.commit, first_call(lambda: lake.append(DS, theirs))),
        pytest.raises(TableError, match="no job of this"),
    ):
        publish(table, numbers(1), replaces=seen)
    assert sorted(values(table)) == ([0, 9] if seen else [9])


def test_another_partition_is_published_meanwhile(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(0), of_plan("p0"))
    other = of_plan(partition="other")
    with wrapped(lake.commit, first_call(lambda: publish(open_lake(lake), numbers(9), other))):
        publish(table, numbers(1))
    assert (values(table), values(table, "other")) == ([1], [9])
    if lake.has_versions:
        assert len(lake.data_files()) == 3  # put there once for both tries


@pytest.mark.parametrize("is_new", [True, False])
def test_another_partition_brings_the_same_new_columns_meanwhile(
    lake: Lake, table: LakeTable, is_new: bool
) -> None:
    if not is_new:
        publish(table, numbers(0), of_plan("p0"))
    more = pa.table({"n": [1, 2], **{kind: KINDS[kind] for kind in ("list", "structs", "map")}})

    def win() -> None:
        publish(open_lake(lake), more, of_plan(partition="other"), add_columns=True)

    with wrapped(lake.commit, first_call(win)):
        publish(table, more, add_columns=True)
    assert rows(table, more.column_names) == rows(table, more.column_names, partition="other")


def test_a_lost_answer_of_a_commit_that_has_happened(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(0), of_plan("p0"))
    with wrapped(lake.commit, losing(lake.lost)):
        publish(table, numbers(1, 2))
    assert (values(table), table.published(DS)) == ([1, 2], of_plan())


def test_an_unknown_outcome_is_not_cleaned_up(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(0), of_plan("p0"))
    is_lost: list[int] = []

    def lose_all(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_lost:
            raise lake.unreadable
        return real(*args, **kwargs)

    def lose_answer(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        is_lost.append(1)
        raise lake.lost

    with (
        wrapped(lake.read, lose_all),
        wrapped(lake.commit, lose_answer),
        pytest.raises(CommitUnknownError, match="commit again"),
    ):
        publish(table, numbers(1, 2))
    assert (values(table), table.published(DS)) == ([1, 2], of_plan())
    publish(table, numbers(1, 2), replaces=of_plan("p0"))
    assert values(table) == [1, 2]


def test_a_failed_commit_leaves_the_table_as_it_was(
    lake: Lake, table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(table, numbers(0), of_plan("p0"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with (
        wrapped(lake.commit, failing(lake.lost)),
        pytest.raises((StorageError, CommitUnknownError), match=DS),
    ):
        publish(table, numbers(1))
    assert (values(table), table.published(DS)) == ([0], of_plan("p0"))
    publish(table, numbers(1))
    assert values(table) == [1]


FOREIGN: dict[str, pa.Array | None] = {
    "there is no column": None,
    "several values": pa.array([of_plan("a").run_id, of_plan("b").run_id]),
    "several values of": pa.array([of_plan("a").run_id, None]),
    "is None": pa.array([None, None], pa.string()),
    "is 'nightly'": pa.array(["nightly"] * 2),
    "is 'job/2026-01-30/a'": pa.array([of_plan("a", "2026-01-30").run_id] * 2),
    "is 1": pa.array([1, 1]),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_foreign_rows_are_neither_replaced_nor_taken_for_ours(
    lake: Lake, table: LakeTable, message: str
) -> None:
    run_ids = FOREIGN[message]
    lake.append(DS, pa.table({"n": [5, 6]} | ({} if run_ids is None else {"run_id": run_ids})))
    why = f".*{message}" if lake.has_versions else ""
    with pytest.raises(TableError, match=f"no job of this{why}"):
        table.published(DS)
    with pytest.raises(TableError, match="no job of this"):
        publish(table, numbers(1), replaces=None)
    assert values(table) == [5, 6]


# Schemas


def test_columns_of_another_type_are_refused(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(1), of_plan(partition="2026-01-01"))
    files = lake.data_files()
    other = pa.table({"n": ["1"]})
    for add_columns in (False, True):
        with pytest.raises(TableError, match=r"column 'n' holds int64.*string"):
            publish(table, other, add_columns=add_columns)
        with pytest.raises(TableError, match=r"column 'n' holds int64.*string"):
            table.check_outputs(DS, other.schema, add_columns=add_columns)
    assert lake.data_files() == files


def test_new_columns_are_added_if_asked_for(lake: Lake, table: LakeTable) -> None:
    publish(table, numbers(1), of_plan(partition="2026-01-01"))
    wide = pa.table({"n": [2], "word": ["x"], "nested": [{"a": [1]}]})
    with pytest.raises(TableError, match=r"no column 'word' nor 'nested'.*add_columns"):
        publish(table, wide)
    with pytest.raises(TableError, match=r"no column 'word' nor 'nested'.*add_columns"):
        table.check_outputs(DS, wide.schema)
    table.check_outputs(DS, wide.schema, add_columns=True)
    publish(table, wide, add_columns=True)
    assert rows(table, ["n", "word", "nested"]) == wide.to_pylist()
    assert values(table, "2026-01-01") == [1]
    if lake.has_versions:
        assert rows(table, ["word"], partition="2026-01-01") == [{"word": None}]


def test_a_column_of_nulls_takes_the_tables_type(lake: Lake, table: LakeTable) -> None:
    if not lake.has_versions:
        pytest.skip("a file of plain Parquet may hold a column without a type")
    without_type = pa.table({"n": [1], "x": pa.nulls(1)})
    publish(table, pa.table({"n": [1], "x": ["a"]}), of_plan(partition="2026-01-01"))
    publish(table, without_type)
    assert rows(table, ["x"]) == [{"x": None}]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["n", "ds"], "partition column 'ds' themselves"),
        (["word", "Word"], "two fields 'Word' differ by case only"),
        (["word", "DS"], "two fields 'DS' differ by case only"),
    ],
)
def test_columns_of_one_job_that_only_parquet_takes(
    table: LakeTable, names: list[str], message: str
) -> None:
    columns = pa.schema([(name, pa.string()) for name in names])
    if isinstance(table, ParquetTable):
        table.check_outputs(DS, columns)
        return
    with pytest.raises(TableError, match=message):
        table.check_outputs(DS, columns)


def test_a_column_that_differs_by_case_only(table: LakeTable) -> None:
    """Most engines couldn't read a table with both."""
    publish(table, pa.table({"Word": ["x"]}), of_plan(partition="2026-01-01"))
    for add_columns in (False, True):
        with pytest.raises(TableError, match="'word' differs from 'Word' by case only"):
            publish(table, pa.table({"word": ["x"]}), add_columns=add_columns)
    publish(table, pa.table({"Word": ["y"]}))
    assert rows(table, ["Word"]) == [{"Word": "y"}]


REQUIRED: dict[str, tuple[pa.DataType, Any]] = {
    "column": (pa.int64(), None),
    "struct": (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {"a": None}),
    "list": (pa.list_(pa.field("element", pa.int64(), nullable=False)), [None]),
    "map": (pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)), [("k", None)]),
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_what_may_not_be_null(lake: Lake, table: LakeTable, kind: str) -> None:
    """What another program demanded of its table. Parts of columns aren't looked into."""
    if not lake.has_versions:
        pytest.skip("plain Parquet makes no demands")
    column, value = REQUIRED[kind]
    fields = [("n", pa.int64()), ("x", column, kind != "column"), ("run_id", pa.string())]
    lake.create(pa.schema([pa.field(*field) for field in fields]))
    with_null = pa.table({"n": [1], "x": pa.array([value], plain_type(column))})
    with pytest.raises(TableError, match=r"'x' .*(may not be null|non-nullable)"):
        publish(table, with_null)
    assert lake.data_files() == []
    if kind == "column":
        with pytest.raises(TableError, match=r"'x' .*(may not be null|non-nullable)"):
            publish(table, numbers(1))
        publish(table, pa.table({"n": [1], "x": [2]}))
        assert values(table) == [1]


def test_a_column_that_is_no_longer_written_is_null(lake: Lake, table: LakeTable) -> None:
    wide = pa.table({"n": [2], "word": ["x"]})
    publish(table, wide, of_plan(partition="2026-01-01"))
    publish(table, numbers(1))
    assert values(table) == [1]
    if lake.has_versions:
        assert rows(table, ["n", "word"]) == [{"n": 1, "word": None}]


def test_equal_types_that_arrow_holds_otherwise_fit(table: LakeTable) -> None:
    words = pa.array(["x", "y"])
    for number, kind in enumerate(
        (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()))
    ):
        whose = of_plan(partition=f"p{number}")
        publish(table, pa.table({"word": words.cast(kind)}), whose)
        found = [row["word"] for row in rows(table, ["word"], partition=whose.partition)]
        assert found == ["x", "y"]
