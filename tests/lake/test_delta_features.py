"""Delta tables with deletion vectors and mapped columns, as Spark and Databricks write them."""

import base64
import io
import json
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake.test_delta import HOSTILE, edit_log, folder, publish, raw, table
from lake.test_tables import numbers, rows, values
from pydantic import TypeAdapter
from pydantic_core import to_json
from pyroaring import BitMap64  # pyiceberg's
from support.lake_tables import DS, of_plan

from batchllm_operator.errors import TableError
from batchllm_operator.lake import FilePart
from batchllm_operator.lake.delta.table import DeltaTable
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage import Folder

__all__ = ["folder", "publish", "table"]
Action = dict[str, Any]
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TO_Z85: Final = str.maketrans(
    f"{_DIGITS}!#$%&()*+-;<=>?@^_`{{|}}~", f"{_DIGITS.swapcase()}.-:+=^!/*?&<>()[]{{}}@%$#"
)


def commit(folder: Folder, version: int, *actions: Action) -> None:
    lines = "\n".join(map(json.dumps, actions))
    folder.write_bytes(f"_delta_log/{version:020}.json", lines.encode())


def create(folder: Folder, fields: list[Action], *files: Action, mode: str = "none") -> None:
    """The first version of a table with both features, partitioned by its last column."""
    features = ["columnMapping", "deletionVectors"]
    protocol: Action = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= {"readerFeatures": features, "writerFeatures": features}
    metadata = {"id": "1", "format": {"provider": "parquet", "options": {}}}
    metadata |= {"schemaString": json.dumps({"type": "struct", "fields": fields})}
    metadata |= {"configuration": {"delta.columnMapping.mode": mode}}
    metadata |= {"partitionColumns": [fields[-1]["name"]]}
    commit(folder, 0, {"protocol": protocol}, {"metaData": metadata}, *files)


def field(name: str, kind: Any, number: int = 0, physical: str = "") -> Action:
    """A field of a table's schema; with a number, a mapped one."""
    named = {"delta.columnMapping.physicalName": physical or f"col-{number}"}
    mapped = named | {"delta.columnMapping.id": number}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapped if number else {}}


def added(
    folder: Folder, name: str, rows: pa.Table, vector: Action | None = None, **stats: Any
) -> Action:
    """Adds a new data file to the table: row groups of five rows."""
    sink = io.BytesIO()
    pq.write_table(rows, sink, row_group_size=5)
    folder.write_bytes(name, sink.getvalue())
    action = {"path": name, "size": len(sink.getvalue()), "modificationTime": 1, "dataChange": True}
    action |= {"partitionValues": {"ds": stats.pop("ds", DS)}}
    action |= {"stats": json.dumps({"numRecords": rows.num_rows, **stats})}
    return {"add": action | ({"deletionVector": vector} if vector else {})}


def vector(folder: Folder, rows: Iterable[int], kind: str = "u") -> Action:
    """The vector that removes rows: inline, or in a new file of the table's folder."""
    bits = BitMap64(rows)
    bits.run_optimize()
    data = (1681511377).to_bytes(4, "little") + bits.serialize()
    described = {"storageType": kind, "sizeInBytes": len(data), "cardinality": len(bits)}
    if kind == "i":
        return described | {"pathOrInlineDv": _z85(data + bytes(-len(data) % 4))}
    number, before = uuid.uuid4(), b"\1and another vector"
    name = f"ab/deletion_vector_{number}.bin"
    parts = before, len(data).to_bytes(4, "big"), data, zlib.crc32(data).to_bytes(4, "big")
    folder.write_bytes(name, b"".join(parts))
    whole = Path(folder.path, name).as_uri() if folder.is_local else f"{folder.uri}/{name}"
    place = f"ab{_z85(number.bytes)}" if kind == "u" else whole
    return described | {"pathOrInlineDv": place, "offset": len(before)}


def _z85(data: bytes) -> str:
    return base64.b85encode(data).decode().translate(_TO_Z85)


def write_mapped(folder: Folder, mode: str, *, has_ids: bool = True) -> None:
    """A table whose second row is removed. In mode `id`, another program has named its columns."""

    def held(number: int, name: str, kind: pa.DataType) -> pa.Field:
        ids = {"PARQUET:field_id": str(number)} if has_ids else {}
        return pa.field(name if mode == "name" else f"x{number}", kind, metadata=ids)

    parts = [held(3, "title", pa.string()), held(9, "col-9", pa.binary())]
    title, content = (part.name for part in parts)
    docs = [{title: "t", content: b"x"}, None, {title: None, content: b"y"}]
    columns = {
        held(1, "n", pa.int64()): [1, 2, 3],
        held(20, "again", pa.string()): ["dropped"] * 3,
        held(5, "document", pa.struct(parts)): docs,
        held(7, "col-7", pa.string()): ["p", "q", "r"],
        held(8, "col-8", pa.string()): ["new", None, "newer"],
    }
    rows = pa.table([*columns.values()], schema=pa.schema([*columns]))
    doc = [field("title", "string", 3, "title"), field("n", "long", 4), field("raw", "binary", 9)]
    fields = [
        field("doc", {"type": "struct", "fields": doc}, 5, "document"),
        field("ds", "long", 6),
        field("a.b", "string", 7),
        field("again", "string", 8),
        field("key", "long", 1, "n"),
        field("day", "string", 2, "ds"),
    ]
    file = added(folder, "a.parquet", rows, vector(folder, [1]))
    gone = added(folder, "gone.parquet", rows, minValues={"n": 10}, maxValues={"n": 20})
    folder.remove("gone.parquet")  # bounds alone say that it isn't needed
    create(folder, fields, file, gone, mode=mode)


NUMBERS = [field("n", "long"), field("ds", "string")]
DELETED = [3, 4, 7, 11, 18, 29, 30, 31, 32, 33, 34, 39]  # one row group is whole


def seen(folder: Folder) -> list[int]:
    """The numbers in all partitions, as delta-rs's own engine reads them."""
    return sorted(pa.table(raw(folder).scan(["n"])).column("n").to_pylist())


@pytest.mark.parametrize("kind", ["i", "u", "p"])
def test_rows_that_a_vector_removes_are_left_out(
    folder: Folder, table: DeltaTable, kind: str
) -> None:
    """However it is stored; other files have others, or none."""
    removed = [vector(folder, rows, kind) for rows in (DELETED, [0, 1], [1])]
    files = [
        added(folder, "a b.parquet", numbers(*range(40)), removed[0]),
        added(folder, "b.parquet", numbers(100, 101)),
        added(folder, "c.parquet", numbers(102, 103), removed[1]),
        added(folder, "d.parquet", numbers(104, 105), removed[2], ds="other"),
    ]
    create(folder, NUMBERS, *files)
    left, snapshot = [n for n in range(40) if n not in DELETED], table.snapshot(DS)
    assert (values(table), values(table, "other")) == ([*left, 100, 101], [104])
    assert seen(folder) == [*left, 100, 101, 104]
    for columns in ([], ["ds"]):  # which no file holds
        assert sum(batch.num_rows for batch in table.scan(snapshot, columns)) == len(left) + 2
    term = FilterTerm(column="n", op=">", value=17)  # in the midst of a row group
    wanted, found = [n for n in left if n > 17], []
    assert [row["n"] for row in rows(table, ["n"], [term])] == [*wanted, 100, 101]
    for begin in range(0, 8, 2):  # as Spark's tasks read parts of a file
        part = FilePart(snapshot.files[0], (begin, begin + 2))
        part = TypeAdapter(FilePart).validate_json(to_json(part))
        for batch in table.scan(replace(snapshot, files=()), ["n"], [term], part):
            found += batch.column("n").to_pylist()
    assert found == wanted
    raw(folder).create_checkpoint()
    folder.remove(f"_delta_log/{0:020}.json")
    assert values(DeltaTable(folder.uri, "ds")) == [*left, 100, 101]


@pytest.mark.parametrize("deleted", [range(140_000), range(0, 140_000, 2), range(9, 131_000)])
def test_vectors_of_many_rows(folder: Folder, table: DeltaTable, deleted: Sequence[int]) -> None:
    every = range(140_000)
    add = added(folder, "a.parquet", numbers(*every), vector(folder, deleted))
    create(folder, NUMBERS, add)
    assert values(table) == [n for n in every if n not in deleted]
    if deleted == every:
        assert (table.snapshot(DS).files, table.published(DS)) == ((), None)


def test_a_snapshot_keeps_the_vectors_of_its_version(folder: Folder, table: DeltaTable) -> None:
    add = added(folder, "a.parquet", numbers(1, 2, 3))["add"]
    create(folder, NUMBERS, {"add": add})
    versions = [table.snapshot(DS)]
    for version, removed in ((1, [0]), (2, [0, 2])):
        before, add = add, add | {"deletionVector": vector(folder, removed)}
        commit(folder, version, {"remove": {**before, "deletionTimestamp": 1}}, {"add": add})
        versions.append(table.snapshot(DS))
    assert [snapshot.version for snapshot in versions] == ["delta:0", "delta:1", "delta:2"]
    tables = (pa.Table.from_batches(table.scan(snapshot, ["n"])) for snapshot in versions)
    assert [found["n"].to_pylist() for found in tables] == [[1, 2, 3], [2, 3], [2]]


@pytest.mark.parametrize("fault", ["damaged", "gone", "counted wrong", "not counted"])
def test_vectors_that_cannot_be_used(folder: Folder, table: DeltaTable, fault: str) -> None:
    stats = {"counted wrong": {"numRecords": 4}, "not counted": {"numRecords": None}}
    removed, counted = vector(folder, [1]), stats.get(fault, {})
    add = added(folder, "a.parquet", numbers(1, 2, 3), removed, **counted)
    create(folder, NUMBERS, add)
    (name,) = (name for name in folder.find() if name.endswith(".bin"))
    data = folder.read_bytes(name)
    if fault == "damaged":
        folder.write_bytes(name, data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])
    elif fault == "gone":
        folder.remove(name)
    refusals = {"counted wrong": "has 3 rows, its log says 4"}
    refusal = refusals.get(fault, "a deletion vector is damaged")
    with pytest.raises(TableError, match=refusal):
        values(table)


def test_files_are_replaced_with_their_vectors(
    folder: Folder, table: DeltaTable, publish: Any
) -> None:
    """To readers, a file with another vector is another file."""
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    publish("a", 1, 2, 3, partition=HOSTILE)
    edit_log(folder, 0, "protocol", minReaderVersion=3, minWriterVersion=7, **features)
    publish("b", 5)
    edit_log(folder, 0, "add", deletionVector=vector(folder, [0, 2]))
    table = DeltaTable(folder.uri, "ds")
    assert values(table, HOSTILE) == [2]
    publish("c", 4, partition=HOSTILE)
    assert table.published(HOSTILE) == of_plan("c", HOSTILE)
    assert (values(table, HOSTILE), seen(folder)) == ([4], [4, 5])


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_read_by_their_names_in_files(folder: Folder, mode: str) -> None:
    """Also those that were renamed, added later, dropped, or have another's earlier name."""
    write_mapped(folder, mode)
    table, term = DeltaTable(folder.uri, "day"), FilterTerm(column="key", op="<=", value=3)
    names = ["day", "key", "ds", "a.b", "again", "doc"]
    expected = [
        (DS, 1, None, "p", "new", {"title": "t", "n": None, "raw": b"x"}),
        (DS, 3, None, "r", "newer", {"title": None, "n": None, "raw": b"y"}),
    ]
    assert table.partitions() == [DS]
    assert [tuple(row.values()) for row in rows(table, names, [term])] == expected
    if mode == "name":  # delta-rs's own engine goes by names in both modes
        found = pa.table(raw(folder).scan(names, "key <= 3")).to_pylist()
        assert [tuple(row.values()) for row in found] == expected
    snapshot = table.snapshot(DS)
    assert sum(batch.num_rows for batch in table.scan(snapshot, [], [term])) == 2
    [batch] = table.scan(snapshot.with_text(), ["doc.raw", "`doc`.title"], [term])
    assert list(batch.to_pydict().values()) == [["x", "y"], ["t", None]]
    with pytest.raises(TableError, match="has the Delta feature columnMapping"):
        table.check_outputs(DS, numbers().schema)


def test_files_without_the_ids_that_columns_go_by(folder: Folder) -> None:
    write_mapped(folder, "id", has_ids=False)
    table, term = DeltaTable(folder.uri, "day"), FilterTerm(column="key", op="<", value=9)
    with pytest.raises(TableError, match=r"a\.parquet can't be read: its columns have no ids"):
        rows(table, ["key"], [term])
