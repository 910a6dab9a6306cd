"""What commit refuses of an output, plan has refused before: columns, values, protocols."""

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, fake_spec, finish
from support.lake_tables import LAKES, IcebergLake, Lake, open_lake, publish

from batchllm_operator.errors import TableError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

NS = 1_700_000_000_000_000_001


@pytest.fixture(params=LAKES)
def lake(
    request: pytest.FixtureRequest, lake_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Lake:
    """Where outputs go."""
    return LAKES[request.param](lake_uri, tmp_path, monkeypatch, "out")


def array(kind: pa.DataType, *values: Any) -> pa.Array:
    return pa.array(values, kind)


COLUMNS: dict[str, pa.Array] = {
    "nanoseconds": array(pa.timestamp("ns"), 0, NS),
    "nanoseconds in a zone": array(pa.timestamp("ns", "UTC"), 0, NS),
    "nanoseconds in lists": array(pa.list_(pa.timestamp("ns")), [0], [NS]),
    "nanoseconds in structs": array(pa.struct([("at", pa.timestamp("ns"))]), None, {"at": NS}),
    "whole microseconds": array(pa.timestamp("ns"), 0, NS - 1),
    "seconds beyond microseconds": array(pa.timestamp("s"), 0, 10**14),
    "a time after 9999": array(pa.timestamp("us"), 0, 9 * 10**18),
    "a time before 1": array(pa.timestamp("ms", "UTC"), 0, -(10**14)),
    "a date after 9999": array(pa.date32(), 0, 2**31 - 1),
    "a date before 1": array(pa.date32(), 0, -(10**6)),
    "dates": array(pa.date64(), 0, 86_400_000),
    "the last date": array(pa.date32(), date(1, 1, 1), date(9999, 12, 31)),
    "times": array(pa.time32("ms"), 0, 1),
    "nanoseconds of a day": array(pa.time64("ns"), 0, 1),
    "durations": array(pa.duration("us"), 0, 1),
    "uint32": array(pa.uint32(), 0, 2**32 - 1),
    "uint64": array(pa.uint64(), 0, 1),
    "float16": pa.array([0.5, 1.5], pa.float16()),
    "NaN": array(pa.float64(), float("nan"), float("-inf")),
    "decimals": array(pa.decimal128(10, 2), Decimal("1.50"), None),
    "large decimals": array(pa.decimal256(50, 2), Decimal("1.50"), None),
    "only nulls": pa.nulls(2),
    "lists of nulls": array(pa.list_(pa.null()), [None], []),
    "structs of nulls": array(pa.struct([("a", pa.null())]), {"a": None}, None),
    "dictionaries": pa.array(["a", "b"]).dictionary_encode(),
    "large text": array(pa.large_string(), "a", "b"),
    "large lists": array(pa.large_list(pa.large_string()), ["a"], None),
    "fixed lists": array(pa.list_(pa.int64(), 2), [1, 2], None),
    "maps": array(pa.map_(pa.string(), pa.uint64()), [("a", 1)], None),
    "UUIDs": pa.array([uuid.UUID(int=number).bytes for number in (1, 2)], pa.uuid()),
    "fixed bytes": array(pa.binary(2), b"ab", b"cd"),
    "JSON": pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(["{}", "[]"])),
    "required parts": array(pa.list_(pa.field("item", pa.int64(), nullable=False)), [1], [2]),
    "fields that differ by case": pa.array([{"a": 1, "A": 2}, None]),
    "a b": pa.array([1, 2]),
    "a;b": pa.array([1, 2]),
    "a{b}": pa.array([1, 2]),
    "a.b": pa.array([1, 2]),
    "ü": pa.array([1, 2]),
    "fields with blanks": pa.array([{"a b": 1}, None]),
}


def name_of(case: str) -> str:
    """The column's name: the case's own if that is what it is about."""
    return case if case.startswith(("a b", "a;", "a{", "a.", "ü")) else "col"


def write_input(folder: Path, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    rows = pa.table({"row_key": ["a", "b"], "document": ["d", "e"], "query": ["q", "r"], **columns})
    place = folder / "documents" / f"ds={DS}" / "a.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, place)
    return rows


def spec_of(lake: Lake, folder: Path, carry: Sequence[str], **changes: Any) -> JobSpec:
    output: dict[str, Any] = {
        "uri": lake.address,
        "staging_uri": lake.staging,
        "carry": list(carry),
    }
    output |= changes.pop("output", {})
    return fake_spec(folder, output=output, **changes)


def refusal(call: Any, *args: Any, **options: Any) -> str | None:
    """The message of the error, up to the row that it names; None without an error."""
    try:
        call(*args, **options)
    except TableError as error:
        return str(error).partition(" in row ")[0].partition("; mend or cast")[0]
    return None


def forget(lake: Lake) -> None:
    """Remove the table."""
    if isinstance(lake, IcebergLake):
        if lake.catalog.table_exists(lake.name):
            lake.catalog.drop_table(lake.name)
        return
    for name in lake.folder.find():
        lake.folder.remove(name)


def run(spec: JobSpec) -> None:
    finish(plan_job(spec, DS))


def test_what_commit_refuses_of_a_column_plan_refuses_with_the_same_error(
    lake: Lake, tmp_path: Path
) -> None:
    taken: dict[str, pa.Array] = {}
    for case, values in COLUMNS.items():
        rows = write_input(tmp_path, {name_of(case): values})
        names = ["row_key", name_of(case)]
        kept = pq.read_table(tmp_path / "documents" / f"ds={DS}" / "a.parquet").select(names)
        said = refusal(publish, open_lake(lake), kept, replaces=None)
        forget(lake)
        assert refusal(plan_job, spec_of(lake, tmp_path, names[1:]), DS) == said, case
        if said is None:
            taken[f"c{len(taken)}" if names[1] == "col" else names[1]] = rows[names[1]]
    assert len(taken) > 15
    write_input(tmp_path, taken)
    run(spec_of(lake, tmp_path, list(taken)))
    assert open_lake(lake).snapshot(DS).num_rows == 2


@pytest.mark.parametrize("case", ["nanoseconds", "UUIDs", "uint64", "durations", "a time before 1"])
def test_what_commit_refuses_of_a_key_plan_refuses(lake: Lake, tmp_path: Path, case: str) -> None:
    rows = write_input(tmp_path, {"col": COLUMNS[case]})
    said = refusal(publish, open_lake(lake), rows.select(["col"]), replaces=None)
    forget(lake)
    spec = spec_of(lake, tmp_path, [], input={"uri": f"{tmp_path}/documents", "key": "col"})
    assert refusal(plan_job, spec, DS) == said


def test_a_value_that_does_not_fit_is_named_with_its_row(tmp_path: Path) -> None:
    many = pa.array([0] * 5000 + [NS], pa.timestamp("ns"))
    keys = [f"k{number}" for number in range(5001)]
    rows = {"row_key": keys, "document": keys, "query": keys, "at": many}
    place = tmp_path / "documents" / f"ds={DS}" / "a.parquet"
    place.parent.mkdir(parents=True)
    pq.write_table(pa.table(rows), place)
    spec = fake_spec(tmp_path, output={"uri": f"delta+{tmp_path}/out", "carry": ["at"]})
    with pytest.raises(TableError) as refused:
        plan_job(spec, DS)
    assert str(refused.value) == (
        f"output delta+{tmp_path}/out: column 'at' has a value that doesn't fit the table's type"
        " timestamp[us] in row 5000 (counted from 0), row_key='k5000'; mend or cast it in a view of"
        " the input, or leave it out of output.carry"
    )


def delta_table(lake: Lake, protocol: dict[str, Any], **configuration: str) -> None:
    """A table of another program, whose protocol asks for more than delta-rs can write."""
    fields: list[dict[str, Any]] = [
        {"name": name, "type": "string", "nullable": True, "metadata": {}}
        for name in ("row_key", "run_id", "ds")
    ]
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": ["ds"],
        "configuration": configuration,
        "createdTime": 1,
    }
    lines = [json.dumps(each) for each in ({"protocol": protocol}, {"metaData": metadata})]
    lake.folder.write_bytes(f"_delta_log/{0:020}.json", "\n".join(lines).encode())


def features(*names: str) -> dict[str, Any]:
    return {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": list(names)}


PROTOCOLS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "clustering": (features("clustering", "domainMetadata"), {}),
    "row tracking": (
        features("rowTracking", "domainMetadata"),
        {"delta.enableRowTracking": "true"},
    ),
    "in-commit timestamps": (
        features("inCommitTimestamp"),
        {"delta.enableInCommitTimestamps": "true"},
    ),
    "identity columns": (features("identityColumns"), {}),
    "identity columns by version": ({"minReaderVersion": 2, "minWriterVersion": 6}, {}),
    "defaults": (features("allowColumnDefaults"), {}),
    "for Iceberg": (features("icebergCompatV2"), {}),
    "an unknown one": (features("fancyNew"), {}),
    "check constraints": (features("checkConstraints"), {"delta.constraints.c": "row_key <> ''"}),
    "a later version": ({"minReaderVersion": 1, "minWriterVersion": 8}, {}),
}


@pytest.mark.parametrize("case", PROTOCOLS)
@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_what_delta_rs_cannot_write_plan_refuses_with_the_error_of_commit(
    lake: Lake, tmp_path: Path, case: str
) -> None:
    protocol, configuration = PROTOCOLS[case]
    delta_table(lake, protocol, **configuration)
    rows = write_input(tmp_path, {}).select(["row_key"])
    said = refusal(publish, open_lake(lake), rows, replaces=None)
    assert said is not None
    found = refusal(plan_job, spec_of(lake, tmp_path, [], output={"add_columns": True}), DS)
    assert sorted(found or "") == sorted(said)  # delta-rs lists features in any order


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write.parquet.compression-codec", "nonsense"),
        ("write.parquet.compression-codec", "lzo"),
        ("write.parquet.row-group-limit", "0"),
        ("write.parquet.row-group-limit", "-1"),
        ("write.metadata.metrics.default", "bogus"),
        ("write.parquet.page-size-bytes", "many"),
        ("write.parquet.bloom-filter-enabled.column.n", None),
    ],
)
@pytest.mark.parametrize("lake", ["iceberg"], indirect=True)
def test_a_property_that_pyiceberg_cannot_write_by_is_refused_by_plan(
    lake: Lake, tmp_path: Path, name: str, value: str | None
) -> None:
    write_input(tmp_path, {})
    create(lake, tmp_path)
    assert isinstance(lake, IcebergLake)
    with lake.load().transaction() as change:
        change.set_properties({name: value or "true"})
    spec = spec_of(lake, tmp_path, [])
    if value is None:  # without an effect
        plan_job(spec, DS)
        return
    with pytest.raises(TableError, match=f"(?i)pyiceberg refuses it: .*{value}"):
        plan_job(spec, DS)


@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_a_partition_of_a_table_that_is_only_appended_to_is_refused_by_plan(
    lake: Lake, tmp_path: Path
) -> None:
    """Only once it holds rows that would have to be replaced."""
    delta_table(lake, features("appendOnly"), **{"delta.appendOnly": "true"})
    write_input(tmp_path, {})
    spec = spec_of(lake, tmp_path, [], output={"add_columns": True})
    run(spec)
    with pytest.raises(TableError, match="append-only"):
        plan_job(spec.model_copy(update={"max_failed_fraction": 0.5}), DS)


def create(lake: Lake, tmp_path: Path, *required: str, **more: pa.DataType) -> None:
    """Another program's table for the job's columns, of which some may not be null."""
    template = LAKES["delta"](f"{tmp_path}/template", tmp_path, pytest.MonkeyPatch(), "out")
    run(spec_of(template, tmp_path, []))
    schema = open_lake(template).snapshot(DS).schema
    fields = [field for field in schema if field.name != "ds"]
    fields += [pa.field(name, kind) for name, kind in more.items()]
    lake.create(pa.schema([field.with_nullable(field.name not in required) for field in fields]))


@pytest.mark.parametrize("lake", ["delta", "iceberg"], indirect=True)
def test_columns_that_may_not_be_null_are_refused_where_rows_would_have_nulls(
    lake: Lake, tmp_path: Path
) -> None:
    write_input(tmp_path, {"n": pa.array([1, None])})
    create(lake, tmp_path, "row_key", "model", "n", n=pa.int64())
    with pytest.raises(TableError, match="'n' may not be null, and the job doesn't write it"):
        plan_job(spec_of(lake, tmp_path, []), DS)
    with pytest.raises(TableError, match=r"'n' may not be null, but is in row 1 .*row_key='b'"):
        plan_job(spec_of(lake, tmp_path, ["n"]), DS)
    write_input(tmp_path, {"n": pa.array([1, 2])})
    run(spec_of(lake, tmp_path, ["n"]))


@pytest.mark.parametrize("lake", ["delta", "iceberg"], indirect=True)
@pytest.mark.parametrize("column", ["generated_text", "error", "num_output_tokens"])
def test_answers_that_may_not_be_null_are_refused_unless_no_row_may_fail(
    lake: Lake, tmp_path: Path, column: str
) -> None:
    write_input(tmp_path, {})
    create(lake, tmp_path, column)
    with pytest.raises(TableError, match=rf"'{column}' may not be null, but rows that"):
        plan_job(spec_of(lake, tmp_path, []), DS)
    if column != "error":
        run(spec_of(lake, tmp_path, [], max_failed_fraction=0.0))
