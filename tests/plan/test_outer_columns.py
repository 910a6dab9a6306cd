"""Inputs partitioned by several columns: what is read as one partition, and what isn't."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import fake_spec, finish
from support.lake_tables import LAKES, DeltaLake, IcebergLake, Lake

from batchllm_operator.errors import EmptyPartitionError, SpecError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder

Values = tuple[str, ...]


def write(lake: Lake, columns: Sequence[str], partitions: Sequence[Values]) -> None:
    """Write a table partitioned by the columns, with a row in each partition."""
    rows = [
        {
            "row_key": "/".join(values),
            "document": "d",
            "query": "q",
            **dict(zip(columns, values, strict=True)),
        }
        for values in partitions
    ]
    table = pa.Table.from_pylist(rows)
    if isinstance(lake, IcebergLake):
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        from batchllm_operator.lake.iceberg.schema import iceberg_schema

        schema = iceberg_schema(table.schema)
        fields = [
            PartitionField(schema.find_field(name).field_id, 1000 + idx, IdentityTransform(), name)
            for idx, name in enumerate(columns)
        ]
        lake.catalog.create_table(lake.name, schema, partition_spec=PartitionSpec(*fields))
        lake.load().append(table)
    elif isinstance(lake, DeltaLake):
        from deltalake import write_deltalake

        write_deltalake(lake.folder.uri, table, partition_by=list(columns))
    else:
        for row in rows:
            sink = io.BytesIO()
            pq.write_table(pa.Table.from_pylist([row]).drop_columns(list(columns)), sink)
            place = "/".join(f"{name}={row[name]}" for name in columns)
            lake.folder.write_bytes(f"{place}/a.parquet", sink.getvalue())


def spec_of(lake: Lake, tmp_path: Path, column: str, **changes: Any) -> JobSpec:
    source = {"uri": lake.address, "partition_column": column, **changes}
    return fake_spec(tmp_path / "job", input=source, output={"carry": []})


MONTHS = [("2026", "01", "31"), ("2026", "03", "31"), ("2026", "03", "01"), ("2025", "01", "30")]
BY_DAY = ("year", "month", "day")


@pytest.mark.parametrize(
    ("columns", "partitions", "several"),
    [
        (BY_DAY, MONTHS, "month '01', '03'"),
        (("event_year", "week"), [("2025", "05"), ("2026", "05")], "event_year '2025', '2026'"),
        (("jahr", "tag"), [("2025", "31"), ("2026", "31")], "jahr '2025', '2026'"),
        (("p_dt", "hour"), [("2026-01-30", "00"), ("2026-01-31", "00")], "p_dt '2026-01-30', "),
        (("day", "hour", "month"), [("31", "04", "01"), ("31", "05", "03")], "month '01', '03', "),
    ],
)
def test_a_part_of_a_date_is_refused_where_it_lies_in_several_dates(
    lake: Lake, tmp_path: Path, columns: Values, partitions: list[Values], several: str
) -> None:
    write(lake, columns, partitions)
    column = "day" if "day" in columns else columns[-1]
    value = partitions[0][columns.index(column)]
    advice = "name the columns in input.partition"
    with pytest.raises(SpecError, match=rf"{column}={value} in {several}.*{advice}"):
        plan_job(spec_of(lake, tmp_path, column), value)


def test_a_filter_tells_the_dates_apart(lake: Lake, tmp_path: Path) -> None:
    write(lake, BY_DAY, MONTHS)
    terms = [{"column": "month", "value": "03"}]
    plan = plan_job(spec_of(lake, tmp_path, "day", filter=terms), "31")
    assert plan.manifest.counts.num_rows == 1
    # In one month only, there is nothing to tell apart.
    assert plan_job(spec_of(lake, tmp_path, "day"), "30").manifest.counts.num_rows == 1


@pytest.mark.parametrize(
    ("columns", "partitions"),
    [
        (("region", "ds"), [("eu", "2026-01-31"), ("us", "2026-01-31")]),
        (("ingest_date", "ds"), [("2026-02-01", "2026-01-31"), ("2026-02-02", "2026-01-31")]),
        (("day", "hour"), [("2026-01-31", "00"), ("2026-01-31", "01")]),
    ],
)
def test_a_whole_date_in_several_outer_folders_is_one_partition(
    lake: Lake, tmp_path: Path, columns: Values, partitions: list[Values]
) -> None:
    write(lake, columns, partitions)
    column = "day" if "day" in columns else "ds"
    plan = plan_job(spec_of(lake, tmp_path, column), "2026-01-31")
    assert plan.manifest.counts.num_rows == 2


@pytest.mark.parametrize(
    ("columns", "forms", "days"),
    [
        (BY_DAY, ("%Y", "%m", "%d"), MONTHS),
        (("y", "m", "d"), ("%Y", "%-m", "%-d"), [("2026", "3", "31"), ("2026", "1", "31")]),
        (("ds", "region"), ("%Y-%m-%d", "eu"), [("2026-03-31", "eu"), ("2026-03-31", "us")]),
    ],
)
def test_several_columns_name_a_partition(
    lake: Lake, tmp_path: Path, columns: Values, forms: Values, days: list[Values]
) -> None:
    write(lake, columns, days)
    spec = spec_of(lake, tmp_path, "ds", partition=dict(zip(columns, forms, strict=True)))
    finish(plan_job(spec, "2026-03-31"))
    output = open_table(spec.output.uri, "ds")
    [batch] = output.scan(output.snapshot("2026-03-31"), ["row_key"])
    keys = {"/".join(values) for values in days}
    assert {row["row_key"] for row in batch.to_pylist()} < keys and batch.num_rows == 1
    with pytest.raises(EmptyPartitionError, match=r"there is no partition .*=2026"):
        plan_job(spec, "2026-12-31")
    with pytest.raises(SpecError, match=r"input\.partition: 'monday' isn't a date or time"):
        plan_job(spec, "monday")
    missing = spec_of(lake, tmp_path, "ds", partition={columns[0]: forms[0], "absent": "%d"})
    with pytest.raises(TableError, match=r"isn't partitioned by .*'absent'"):
        plan_job(missing, "2026-03-31")


def test_columns_that_leave_the_year_open_are_refused(lake: Lake, tmp_path: Path) -> None:
    write(lake, BY_DAY, [*MONTHS, ("2025", "03", "31")])
    spec = spec_of(lake, tmp_path, "ds", partition={"month": "%m", "day": "%d"})
    with pytest.raises(SpecError, match="in year '2025', '2026'"):
        plan_job(spec, "2026-03-31")


def test_an_outer_folder_is_a_table_by_itself(lake_uri: str, tmp_path: Path) -> None:
    write(lake := LAKES["parquet"](lake_uri, tmp_path, pytest.MonkeyPatch()), BY_DAY, MONTHS)
    uri = f"{lake.address}/year=2026/month=03"
    plan = plan_job(spec_of(lake, tmp_path, "day", uri=uri), "31")
    assert plan.manifest.counts.num_rows == 1


def test_an_output_beside_folders_of_other_columns_is_refused(lake_uri: str) -> None:
    """Readers would take `day=31` of all months and that of the job for one partition."""
    folder = Folder.open(lake_uri)
    for name in ("day=30/data.parquet", "year=2026/month=01/day=31/part-0"):
        sink = io.BytesIO()
        pq.write_table(pa.table({"n": [1]}), sink)
        folder.write_bytes(name, sink.getvalue())
    table = open_table(lake_uri, "day")
    with pytest.raises(TableError, match="'year=2026/month=01/day=31/part-0', but isn't part"):
        table.check_outputs("31", pa.schema([("n", pa.int64())]))
