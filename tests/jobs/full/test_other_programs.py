"""DuckDB and polars write the inputs, with the types that they have, and read the outputs."""

from pathlib import Path
from typing import Any

import pytest
from support.fake_job import DS, fake_spec, finish
from support.lake_tables import LAKES

from batchllm_operator.plan.plan_job import plan_job

pytestmark = pytest.mark.usefixtures("programs")
COLUMNS = {
    "tinyint": "i::UTINYINT",
    "price": "i::DECIMAL(38, 3)",
    "nano": "TIMESTAMP_NS '2026-01-31 01:02:03.123456'",
    "zoned": "TIMESTAMPTZ '2026-01-31 01:02:03+01'",
    "day": "DATE '2026-01-31' + i::INTEGER",
    "blob": "encode('caf\u00e9')",
    "list": "[i, NULL]",
    "doc": "{'title': 'T' || i, 'n': i}",
    "enum": "(CASE i % 2 WHEN 0 THEN 'a' ELSE 'b' END)::ENUM('a', 'b')",
    "flag": "i > 3",
}
NUM_ROWS = 20


def query() -> str:
    """Rows as DuckDB makes them."""
    more = ", ".join(f"{value} AS {name}" for name, value in COLUMNS.items())
    return (
        f"SELECT 'r' || i AS row_key, 'document ' || i // 5 AS document, {more}, '{DS}' AS ds"
        f" FROM range({NUM_ROWS}) numbers(i)"
    )


def write(program: str, lake: Any) -> None:
    import duckdb
    import polars as pl

    Path(lake.folder.uri).parent.mkdir(exist_ok=True)
    if program == "duckdb":
        duckdb.sql(f"COPY ({query()}) TO '{lake.address}' (FORMAT parquet, PARTITION_BY (ds))")
        return
    rows = duckdb.sql(query()).pl()
    if lake.address.startswith("delta+"):
        rows = rows.cast({"enum": pl.String})
        rows.write_delta(lake.folder.uri, delta_write_options={"partition_by": ["ds"]})
    elif lake.address.startswith("iceberg:"):
        kinds = {"enum": pl.String, "tinyint": pl.Int32, "nano": pl.Datetime("us")}
        rows = rows.cast(kinds)
        lake.create(rows.drop("ds").to_arrow().schema)
        rows.write_iceberg(lake.load(), mode="append")
    else:
        rows.write_parquet(lake.address, partition_by=["ds"], mkdir=True)


def read(lake: Any) -> list[Any]:
    """The rows of a table as each program reads them."""
    import duckdb
    import polars as pl

    if lake.address.startswith("delta+"):
        return [pl.read_delta(lake.folder.uri)]
    if lake.address.startswith("iceberg:"):
        return [pl.scan_iceberg(lake.load(), reader_override="native").collect()]
    files = f"{lake.address}/ds=*/*.parquet"
    return [pl.read_parquet(files), duckdb.sql(f"SELECT * FROM read_parquet('{files}')").pl()]


@pytest.mark.parametrize(
    ("program", "form"), [("duckdb", "parquet"), *(("polars", form) for form in LAKES)]
)
def test_jobs_between_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, form: str
) -> None:
    import duckdb

    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # one more package, else a warning
    table, out = (
        LAKES[form](str(tmp_path / "lake"), tmp_path, monkeypatch, name)
        for name in ("table", "out")
    )
    write(program, table)
    template = "{document} {doc.title} {list} {price} {zoned} {day} {enum} {flag} {tinyint}"
    spec = fake_spec(
        tmp_path,
        input={"uri": table.address, "key": "row_key"},
        output={"uri": out.address, "carry": list(COLUMNS), "staging_uri": out.staging},
        prompt={"template": template},
    )
    finish(plan_job(spec, DS))
    written = duckdb.sql(query()).pl().sort("row_key").select(*COLUMNS).rows()
    for rows in read(out):
        assert rows["generated_text"].null_count() == 0
        assert rows.sort("row_key").select(*COLUMNS).rows() == written
