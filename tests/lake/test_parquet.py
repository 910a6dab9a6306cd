"""What is Parquet's own; `test_tables` has what all lake tables promise."""

from __future__ import annotations

import datetime
import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from lake.test_tables import numbers, rows
from support.lake_tables import DS, HIVE_NULL, of_plan, publish, published_file

from batchllm_operator.errors import (
    CommitUnknownError,
    ConflictError,
    StorageError,
    TableError,
)
from batchllm_operator.lake import (
    LakeTable,
    ParquetTable,
    open_table,
)
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage import Folder


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.fixture
def folder(lake_uri: str) -> Folder:
    return Folder.open(lake_uri).child("table")


@pytest.fixture
def table(folder: Folder) -> LakeTable:
    return open_table(folder.uri, "ds")


def put(folder: Folder, name: str, table: pa.Table, **options: Any) -> None:
    folder.write_bytes(name, parquet_bytes(table, **options))


# Snapshots


def test_the_version_changes_with_the_content_only(folder: Folder, table: LakeTable) -> None:
    put(folder, f"ds={DS}/a.parquet", numbers(1, 2))
    before = table.snapshot(DS)
    put(folder, f"ds={DS}/a.parquet", numbers(1, 2))
    if not folder.uri.startswith("abfss"):  # Azure's ETags change with each write
        assert table.snapshot(DS) == before
    put(folder, f"ds={DS}/a.parquet", numbers(1, 3))
    assert table.snapshot(DS).files[0].version != before.files[0].version


def test_partitions_are_listed_by_name(folder: Folder, table: LakeTable) -> None:
    assert table.partitions() == []
    for name in ("ds=b/x", "ds=a%2Fb/x", "_batchllm/x", "other=c/x", "region=eu/ds=c/x"):
        put(folder, f"{name}.parquet", numbers(1))
    for name in ("region=us/ds=a/x", "_old=1/ds=c/x", "_batchllm/ds=d/x"):
        put(folder, f"{name}.parquet", numbers(1))
    assert table.partitions() == ["a", "a/b", "b", "c"]


def test_a_table_without_the_partition_column(folder: Folder, table: LakeTable) -> None:
    folder.write_bytes(f"_batchllm/ds={DS}/a.parquet", b"PAR1")
    with pytest.raises(TableError, match="holds no Parquet files"):
        table.snapshot(DS)
    put(folder, f"date={DS}/a.parquet", numbers(1))
    with pytest.raises(TableError, match="isn't partitioned by 'ds'"):
        table.snapshot(DS)


@pytest.mark.parametrize("data", [b"", b"PAR1 and half of a file"])
def test_an_absent_partition_does_not_mind_another_ones_broken_files(
    folder: Folder, table: LakeTable, data: bytes
) -> None:
    """They may just be uploaded."""
    put(folder, "ds=2025-01-01/a.parquet", numbers(1))
    folder.write_bytes("ds=2025-01-01/b.parquet", data)
    folder.write_bytes("ds=2099-01-01/a.parquet", data)
    snapshot = table.snapshot(DS)
    assert (snapshot.files, snapshot.schema.names) == ((), ["n", "ds"])
    folder.write_bytes("ds=2025-01-01/a.parquet", data)
    with pytest.raises(TableError, match=r"ds=2099-01-01/a\.parquet is"):
        table.snapshot(DS)


@pytest.mark.parametrize("bare", [DS, "2099-01-01"])
def test_a_partition_folder_without_data_is_an_empty_partition(
    folder: Folder, table: LakeTable, bare: str
) -> None:
    """Spark leaves `_SUCCESS` alone in one; what lies in other partitions gives the schema."""
    put(folder, "ds=2025-01-01/a.parquet", numbers(1))
    folder.write_bytes(f"ds={bare}/_SUCCESS", b"")
    snapshot = table.snapshot(DS)
    assert snapshot.files == ()
    assert snapshot.schema.names == ["n", "ds"]


@pytest.mark.parametrize(
    "hidden",
    [
        *("_batchllm/x.parquet", "_SUCCESS", ".crc", "_tmp.parquet", ".x/y.parquet"),
        *(".a.parquet.crc", "_metadata", "region=eu/_SUCCESS", "region=eu/.b.parquet.crc"),
    ],
)
def test_hidden_files_are_not_data(folder: Folder, table: LakeTable, hidden: str) -> None:
    put(folder, f"ds={DS}/a.parquet", numbers(1))
    folder.write_bytes(f"ds={DS}/{hidden}", b"anything")
    for name in (hidden, "notes.txt", "ds=2026-02-01/README.md", "other/b.csv"):  # not looked at
        folder.write_bytes(name, b"anything")
    assert rows(table, ["n"]) == [{"n": 1}]


@pytest.mark.parametrize(
    "name", ["README.md", "a.parquet.crc", "b.csv", "part-0.parquet.gz", "region=eu/c.json"]
)
def test_a_visible_file_of_another_kind_is_named(
    folder: Folder, table: LakeTable, name: str
) -> None:
    """Its rows would be left out."""
    put(folder, f"ds={DS}/a.parquet", numbers(1))
    folder.write_bytes(f"ds={DS}/{name}", b"id,doc\n1,hello\n")
    with pytest.raises(TableError, match=rf"ds={DS}/{name} isn't .* begin its name with _"):
        table.snapshot(DS)


def test_files_are_known_by_their_content_not_by_their_names(
    folder: Folder, table: LakeTable
) -> None:
    """As pipelines leave them that wrote some days with another tool."""
    names = ("a.parquet", "b.PARQUET", "c", "d.snappy", "e.parquet.snappy", "region=eu/f.pq")
    for number, name in enumerate(names):
        put(folder, f"ds={DS}/{name}", numbers(number))
    assert [row["n"] for row in rows(table, ["n"])] == list(range(len(names)))


WHOLE = parquet_bytes(numbers(*range(1000)))
NOT_WHOLE = {
    "cut in half": WHOLE[: len(WHOLE) // 2],
    "last byte lost": WHOLE[:-1],
    "magic only": b"PAR1",
    "nothing": b"",
    "a byte": b"x",
    "text": b"id,doc\n1,hello\n",
    "footer longer than the file": b"PAR1" + (10_000).to_bytes(4, "little") + b"PAR1",
    "footer of zeros": b"PAR1" + bytes(64) + (64).to_bytes(4, "little") + b"PAR1",
}
BROKEN = {
    **{name: (data, "") for name, data in NOT_WHOLE.items()},
    "encrypted": (b"PARE" + WHOLE[4:-4] + b"PARE", " is encrypted"),
    "a name that isn't UTF-8": (
        parquet_bytes(pa.table({"ZZZZ": [1]})).replace(b"ZZZZ", b"\xff\xfeZZ"),
        " has a column whose name isn't UTF-8",
    ),
    "two columns of one name": (
        parquet_bytes(pa.table([pa.array([1]), pa.array([2])], names=["n", "n"])),
        " has 2 columns named 'n'",
    ),
    "damaged data below a whole footer": (
        b"PAR1" + bytes(len(WHOLE) // 2 - 4) + WHOLE[len(WHOLE) // 2 :],
        " can't be read",
    ),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_named(
    folder: Folder, table: LakeTable, data: bytes, message: str
) -> None:
    """A retry won't help: the table is at fault, not the storage."""
    put(folder, f"ds={DS}/a.parquet", numbers(1))
    folder.write_bytes(f"ds={DS}/b.parquet", data)
    with pytest.raises(TableError, match=rf"ds={DS}/b\.parquet{message}"):
        rows(table, ["n"])


@pytest.mark.parametrize("kind", ["folder", "folder of a column", "partition", "nothing", "pipe"])
def test_what_is_no_file_is_not_left_out(tmp_path: Path, kind: str) -> None:
    """Its rows would be missing, and nobody would know."""
    source, other = Folder.open(str(tmp_path / "in")), tmp_path / "other"
    put(source, f"ds={DS}/a.parquet", numbers(1))
    put(Folder.open(str(other)), "b.parquet", numbers(2))
    partition = tmp_path / "in" / f"ds={DS}"
    match kind:
        case "folder":
            (partition / "b.parquet").symlink_to(other)
        case "folder of a column":
            (partition / "region=eu").symlink_to(other)
        case "partition":
            partition.rename(tmp_path / "moved")
            partition.symlink_to(tmp_path / "moved")
        case "nothing":
            (partition / "b.parquet").symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(partition / "b.parquet")
    with pytest.raises(TableError, match=rf"ds={DS}.* is a broken link, a link to a folder, or"):
        open_table(source.uri, "ds").snapshot(DS)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    put(Folder.open(str(tmp_path)), "real.parquet", numbers(1))
    partition = tmp_path / "in" / f"ds={DS}"
    partition.mkdir(parents=True)
    (partition / "a.parquet").symlink_to(tmp_path / "real.parquet")
    assert rows(open_table(str(tmp_path / "in"), "ds"), ["n"]) == [{"n": 1}]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    source = Folder.open(str(tmp_path))
    for name in (f"ds={DS}/a.parquet", os.fsdecode(b"ds=\xff/a.parquet")):
        put(source, name, numbers(1))
    table = open_table(str(tmp_path), "ds")
    assert rows(table, ["n"]) == [{"n": 1}]  # another partition's name is none of its business
    put(source, os.fsdecode(f"ds={DS}/".encode() + b"\xff.parquet"), numbers(2))
    with pytest.raises(TableError, match=r"udcff.parquet' isn't UTF-8; rename it"):
        table.snapshot(DS)


def test_a_number_that_the_wider_type_cannot_hold(folder: Folder, table: LakeTable) -> None:
    put(folder, f"ds={DS}/a.parquet", numbers(2**62 + 1))
    put(folder, f"ds={DS}/b.parquet", pa.table({"n": [1.5]}))
    with pytest.raises(TableError, match=f"ds={DS}/a.parquet can't .* 'n' doesn't fit double"):
        rows(table, ["n"])


@pytest.mark.parametrize("name", ["b", "ds=2026-01-01_$folder$"])
def test_empty_files_without_the_suffix_are_not_data(
    folder: Folder, table: LakeTable, name: str
) -> None:
    """Hadoop marks folders on S3 by them."""
    put(folder, f"ds={DS}/a", numbers(1))
    folder.write_bytes(f"ds={DS}/{name}", b"")
    assert rows(table, ["n"]) == [{"n": 1}]


# Scans


def test_files_that_disagree_on_a_column_are_named(folder: Folder, table: LakeTable) -> None:
    for name, values in (("a", [1]), ("b", [1.5]), ("c", ["one"]), ("d", [[1]])):
        put(folder, f"ds={DS}/{name}.parquet", pa.table({"x": [1], "n": values}))
    named = rf"column 'n' holds int64 in ds={DS}/a.parquet, but string in ds={DS}/c.parquet"
    with pytest.raises(TableError, match=named):
        table.snapshot(DS)


def test_unknown_columns_are_named_with_those_there_are(folder: Folder, table: LakeTable) -> None:
    put(folder, f"ds={DS}/a.parquet", pa.table({"doc": ["x"], "query": ["y"]}))
    with pytest.raises(TableError, match="no column 'title'; the table has doc, query, ds"):
        rows(table, ["doc", "title"])


READ: dict[str, tuple[dict[str, pa.Table], list[dict[str, Any]]]] = {
    "different schemas": (
        {
            "a": pa.table({"n": pa.array([1], pa.int32()), "doc": ["x"]}),
            "b": pa.table({"doc": ["y"], "n": [2**40], "title": ["t"]}),
        },
        [{"n": 1, "doc": "x", "title": None}, {"n": 2**40, "doc": "y", "title": "t"}],
    ),
    "a required column that another file lacks": (
        {
            "a": numbers(1).cast(pa.schema([pa.field("n", pa.int64(), nullable=False)])),
            "b": pa.table({"doc": ["y"]}),
        },
        [{"n": 1}, {"n": None}],
    ),
    "further folder levels": (
        {"region=eu/a": numbers(1), "region=a%2Fb/a": numbers(2)},
        [{"n": 2, "region": "a/b"}, {"n": 1, "region": "eu"}],
    ),
    "a folder level that some files lack": (
        {
            "region=eu/a": numbers(1),
            f"region={HIVE_NULL}/a": numbers(2),
            "x": numbers(3),
            "y": pa.table({"n": [4], "region": ["us"]}),
        },
        [
            {"region": None, "n": 2},
            {"region": "eu", "n": 1},
            {"region": None, "n": 3},
            {"region": "us", "n": 4},
        ],
    ),
    "names with dots": (
        {"a": pa.table({"a.b": [1], "a": [{"b": 2, "c": 3}], "c": [4]})},
        [{"a": {"b": 2, "c": 3}, "c": 4, "a.b": 1}],
    ),
    "a column of the folder's name": (
        {"a": pa.table({"ds": ["something else"], "n": [1]})},
        [{"ds": DS}],
    ),
}


@pytest.mark.parametrize(("files", "expected"), READ.values(), ids=READ)
def test_files_that_differ(
    folder: Folder, table: LakeTable, files: dict[str, pa.Table], expected: list[dict[str, Any]]
) -> None:
    for name, data in files.items():
        put(folder, f"ds={DS}/{name}.parquet", data)
    assert rows(table, list(expected[0])) == expected
    for name, value in expected[-1].items():
        if isinstance(value, int | str):
            condition = FilterTerm(column=name, value=value)
            assert rows(table, list(expected[0]), [condition]) == expected[-1:]


@pytest.mark.parametrize("kind", [pa.float64(), pa.string(), pa.int32()], ids=str)
@pytest.mark.parametrize(
    "values",
    [["x"], [2**60 + 1], [True], [["x"]], [{"a": 1}], [datetime.date(2026, 1, 1)]],
    ids=str,
)
def test_a_column_without_values_fits_any_type(
    folder: Folder, table: LakeTable, kind: pa.DataType, values: list[Any]
) -> None:
    """As pandas, for one, writes it: floats, whatever the column holds elsewhere."""
    for name, column in (("a", pa.nulls(1)), ("b", pa.nulls(2, kind)), ("d", pa.nulls(1, kind))):
        put(folder, f"ds={DS}/{name}.parquet", pa.table({"x": column}))
    assert table.snapshot(DS).schema.field("x").type == kind  # no file knows better
    put(folder, f"ds={DS}/c.parquet", pa.table({"x": values}))
    assert [row["x"] for row in rows(table, ["x"])] == [None, None, None, *values, None]
    put(folder, f"ds={DS}/e.parquet", pa.table({"x": pa.array([None, "y"])}))
    if not isinstance(values[0], str):  # which file has no values isn't forgotten
        with pytest.raises(TableError, match=r"in .*/c\.parquet, but string in .*/e\.parquet"):
            table.snapshot(DS)


def words(index: pa.DataType | None = None) -> pa.DataType:
    return pa.string() if index is None else pa.dictionary(index, pa.string())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.large_string(), pa.large_string()),
        (words(pa.int32()), words(pa.int32())),
        (words(), pa.large_string()),
        (words(pa.int8()), words(pa.int32())),
        (words(pa.int8()), words()),
        (pa.large_string(), words(pa.int32())),
        (pa.string_view(), words(pa.int32())),
    ],
    ids=str,
)
def test_kinds_of_strings(
    folder: Folder, table: LakeTable, first: pa.DataType, second: pa.DataType
) -> None:
    for name, kind, texts in (("a", first, ["x", None]), ("b", second, ["y", "x"])):
        put(folder, f"ds={DS}/{name}.parquet", pa.table({"doc": pa.array(texts).cast(kind)}))
    snapshot = table.snapshot(DS)
    for batch in table.scan(snapshot, ["doc"]):
        assert batch.schema.field("doc") == snapshot.schema.field("doc")
    assert [row["doc"] for row in rows(table, ["doc"])] == ["x", None, "y", "x"]
    condition = FilterTerm(column="doc", value="x")
    assert [row["doc"] for row in rows(table, ["doc"], [condition])] == ["x", "x"]


def test_s3_that_goes_away_under_a_scan(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import EndpointConnectionError
    from s3fs.core import S3File

    def unreachable(*args: object) -> bytes:
        raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")

    folder = Folder.open(f"{s3_bucket}/table")
    put(folder, f"ds={DS}/a.parquet", numbers(1))
    table = ParquetTable(folder, "ds")
    snapshot = table.snapshot(DS)
    monkeypatch.setattr(S3File, "_fetch_range", unreachable)
    with pytest.raises(StorageError, match=r"ds=2026-01-31/a\.parquet can't be read"):
        list(table.scan(snapshot, ["n"]))


# Publishing


def test_publish_makes_a_partition_that_any_reader_reads(folder: Folder, table: LakeTable) -> None:
    assert table.published(DS) is None
    publish(table, numbers(1, 2))
    assert table.published(DS) == of_plan()
    assert list(folder.find()) == [f"ds={DS}/data.parquet"]
    plain = pq.read_table(
        folder.full_path(""), filesystem=folder.fs, partitioning="hive"
    ).to_pylist()
    assert [row["n"] for row in plain] == [1, 2]


FOREIGN: dict[str, Callable[[], tuple[str, bytes]]] = {
    "another file": lambda: ("part-00000.parquet", parquet_bytes(numbers(5))),
    "another data.parquet": lambda: ("data.parquet", parquet_bytes(numbers(5))),
    "a broken data.parquet": lambda: ("data.parquet", WHOLE[:-1]),
    "a data.parquet of zeros": lambda: ("data.parquet", NOT_WHOLE["footer of zeros"]),
    "a file in a folder": lambda: ("region=eu/data.parquet", parquet_bytes(numbers(5))),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_partition_is_neither_replaced_nor_added_to(
    folder: Folder, table: LakeTable, make: Callable[[], tuple[str, bytes]]
) -> None:
    name, data = make()
    folder.write_bytes(f"ds={DS}/{name}", data)
    with pytest.raises(TableError, match=name):
        table.published(DS)
    with pytest.raises(TableError, match=name):
        publish(table, numbers(1))
    assert list(folder.find()) == [f"ds={DS}/{name}"]
    assert folder.read_bytes(f"ds={DS}/{name}") == data


@pytest.mark.parametrize(
    ("partition", "own", "name"),
    [
        ("a b", "ds=a%20b", "ds=a b"),
        ("a b", "ds=a%20b", "ds=%61%20b"),
        ("a/ü", "ds=a%2Fü", "ds=a%2F%C3%BC"),  # Hive takes each escape for one character
    ],
)
def test_a_folder_whose_name_another_program_has_escaped(
    folder: Folder, table: LakeTable, partition: str, own: str, name: str
) -> None:
    """To readers it is the partition itself: theirs, or ours once it was moved and renamed."""
    put(folder, f"{name}/part-0.parquet", numbers(5))
    for use in (
        lambda: table.published(partition),
        lambda: publish(table, numbers(1), of_plan(partition=partition)),
    ):
        with pytest.raises(TableError, match=r"part-0\.parquet.*no job of this package"):
            use()
    folder.remove(f"{name}/part-0.parquet")
    publish(table, numbers(1), of_plan(partition=partition))
    folder.write_bytes(f"{name}/data.parquet", folder.read_bytes(f"{own}/data.parquet"))
    with pytest.raises(TableError, match="lies in two folders"):
        table.published(partition)
    folder.remove(f"{own}/data.parquet")
    publish(table, numbers(2), of_plan("p2", partition))
    assert list(folder.find()) == [f"{name}/data.parquet"]
    assert rows(table, ["n"], partition=partition) == [{"n": 2}]


@pytest.mark.parametrize("name", ["a.parquet", "region=eu/a.parquet"])
def test_another_table_in_the_place_of_a_new_one(
    folder: Folder, table: LakeTable, name: str
) -> None:
    put(folder, name, numbers(5))
    folder.write_bytes("notes.txt", b"")
    with pytest.raises(TableError, match=f"holds '{name}', but isn't partitioned by 'ds'"):
        publish(table, numbers(1))
    folder.remove(name)
    folder.write_bytes("_batchllm/plan/rows.parquet", b"")
    publish(table, numbers(1))


def test_markers_beside_the_data_are_left_alone(folder: Folder, table: LakeTable) -> None:
    folder.write_bytes(f"ds={DS}/_SUCCESS", b"")
    publish(table, numbers(1))
    assert list(folder.find()) == [f"ds={DS}/_SUCCESS", f"ds={DS}/data.parquet"]


def test_folder_markers_on_s3_are_no_files(s3_bucket: str) -> None:
    """Consoles and Hadoop leave an object `folder/` without content for a folder."""
    folder = Folder.open(f"{s3_bucket}/table")
    bucket = s3_bucket.removeprefix("s3://")
    for key in ("table/", f"table/ds={DS}/", "table/ds=2026-02-01/"):
        folder.fs.call_s3("put_object", Bucket=bucket, Key=key, Body=b"")
    table = ParquetTable(folder, "ds")
    assert table.published(DS) is None
    publish(table, numbers(1))
    assert rows(table, ["n"]) == [{"n": 1}]
    assert table.snapshot("2026-02-01").files == ()


def test_publishers_side_by_side(folder: Folder, tmp_path: Path) -> None:
    """Of those who have seen the same, exactly one publishes."""
    sources = {
        plan_id: published_file(tmp_path / plan_id, numbers(number), of_plan(plan_id))
        for number, plan_id in enumerate(("p0", "p1", "p2", "p3"))
    }
    outcomes: dict[str, type[Exception] | None] = {}

    def run(plan_id: str) -> None:
        table = open_table(folder.uri, "ds")
        try:
            table.publish(of_plan(plan_id), sources[plan_id], replaces=None)
            outcomes[plan_id] = None
        except ConflictError as error:
            outcomes[plan_id] = type(error)

    threads = [threading.Thread(target=run, args=(plan_id,)) for plan_id in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [plan_id for plan_id, failure in outcomes.items() if failure is None]
    assert len(outcomes) == 4
    table = open_table(folder.uri, "ds")
    assert table.published(DS) == of_plan(winner)
    assert rows(table, ["n"]) == [{"n": int(winner[1])}]
    assert list(folder.find()) == [f"ds={DS}/data.parquet"]


def test_a_reader_meanwhile_sees_a_whole_partition_each_time(
    folder: Folder, table: LakeTable
) -> None:
    """Never a part, a mixture or nothing."""
    publish(table, numbers(0), of_plan("p0"))
    seen: list[list[int]] = []
    is_over = threading.Event()

    def read_all() -> None:
        while not is_over.is_set():
            data = folder.read_bytes(f"ds={DS}/data.parquet")
            seen.append(pq.read_table(io.BytesIO(data))["n"].to_pylist())

    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read_all)
        for last in range(1, 11):
            publish(table, numbers(*range(last + 1)), of_plan(f"p{last}"))
            num_seen = len(seen)
            while len(seen) < num_seen + 2 and not reading.done():
                time.sleep(0.001)
        is_over.set()
        reading.result()
    assert all(read == [*range(len(read))] for read in seen)
    assert {len(read) for read in seen} >= {*range(2, 12)}


@pytest.mark.parametrize(
    ("status", "code", "kind", "num_tries"),
    [
        (403, "AccessDenied", StorageError, 1),
        (500, "InternalError", CommitUnknownError, 1),
        (None, "", CommitUnknownError, 1),
        (409, "ConditionalRequestConflict", StorageError, 20),
    ],
)
def test_s3_that_does_not_take_a_file(
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    code: str,
    kind: type[Exception],
    num_tries: int,
) -> None:
    """Without an answer the request may yet arrive; a conflict may be with one that is lost."""
    table = open_table(f"{s3_bucket}/table", "ds")
    source = published_file(tmp_path / "x", numbers(1), of_plan())
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)

    def fail(*args: Any, **kwargs: Any) -> None:
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        cause = ClientError(answer, "PutObject") if status else None
        raise OSError(5, "no luck") from cause

    monkeypatch.setattr("batchllm_operator.storage.s3.S3Files.put_if", fail)
    with pytest.raises(kind, match="no luck"):
        table.publish(of_plan(), source, replaces=None)
    assert len(pauses) == num_tries
    assert len(set(pauses)) == num_tries
    assert table.published(DS) is None


def test_a_file_that_does_not_say_whose_it_is(table: LakeTable, tmp_path: Path) -> None:
    source = published_file(tmp_path / "x", numbers(1), of_plan("p2"))
    with pytest.raises(ValueError, match="doesn't name"):
        table.publish(of_plan(), source, replaces=None)
