"""Rows of a plan, known again by their keys."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, fake_spec

from batchllm_operator.errors import PlanError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.plan.rows.known_rows import KnownRows
from batchllm_operator.stored_plan.stored_plan import StoredPlan

DAY = datetime.date(2026, 1, 1)
TIME = datetime.datetime(2026, 1, 1, 12)


def plan_with(folder: Path, **keys: pa.Array) -> StoredPlan:
    """A plan whose key is these columns."""
    num_rows = len(next(iter(keys.values())))
    table = pa.Table.from_pylist(document_rows(num_rows, 1)).drop_columns("row_key")
    for name, column in keys.items():
        table = table.append_column(name, column)
    partition = folder / "documents" / f"ds={DS}"
    partition.mkdir(parents=True)
    pq.write_table(table, partition / "a.parquet")
    return plan_job(fake_spec(folder, input={"key": list(keys)}), DS)


def batch_of(columns: dict[str, Any]) -> pa.RecordBatch:
    return pa.record_batch({**columns, "other": [0] * len(next(iter(columns.values())))})


@pytest.mark.parametrize(
    ("key", "published"),
    [
        (pa.array([7, 8, 9], pa.uint32()), pa.int64()),
        (pa.array([7, 8, 9], pa.int8()), pa.int64()),
        (pa.array([1.5, -0.25, 1e300]), pa.float64()),
        (pa.array(["a", "b", ""]), pa.large_string()),
        (pa.array(["a", "b", "c"]).dictionary_encode(), pa.string()),
        (pa.array([b"aa", b"\0\0", b"a\0"], pa.binary(2)), pa.binary()),
        (pa.array([DAY, DAY.replace(day=2), DAY.replace(day=3)], pa.date64()), pa.date32()),
        (pa.array([TIME, TIME.replace(hour=1), TIME.replace(hour=2)], pa.timestamp("ns")), None),
        (pa.array([Decimal("1.50"), Decimal("-2"), Decimal(0)]), pa.decimal128(20, 2)),
    ],
    ids=str,
)
def test_keys_are_compared_as_the_table_holds_them(
    tmp_path: Path, key: pa.Array, published: pa.DataType | None
) -> None:
    held = key.cast(published or pa.timestamp("us", "UTC"))
    known = KnownRows(plan_with(tmp_path, id=key), pa.schema([("id", held.type)]))
    turned = held.take(pa.array([2, 0, 1]))
    assert known.take(batch_of({"id": turned})).tolist() == [2, 0, 1]


def test_each_row_is_found_once_and_others_never(tmp_path: Path) -> None:
    first, second = pa.array(["a", "ab", "", "x"]), pa.array(["bc", "c", "1:", "1:"])
    plan = plan_with(tmp_path, first=first, second=second)
    known = KnownRows(plan, pa.schema([("second", pa.string()), ("first", pa.string())]))
    rows = batch_of({"second": ["c", "c", "1:", "bc", None], "first": ["ab", "ab", "ab", "a", "x"]})
    assert known.take(rows).tolist() == [1, -1, -1, 0, -1]
    again = batch_of({"first": ["", "a", None, "x"], "second": ["1:", "bc", "1:", "1:"]})
    assert known.take(again).tolist() == [2, -1, -1, 3]
    assert known.take(again.slice(0, 0)).tolist() == []


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, id=pa.array(["a", "b"]))
    with pytest.raises(PlanError, match="no column 'id'"):
        KnownRows(plan, pa.schema([("key", pa.string())]))
    with pytest.raises(pa.ArrowException):
        KnownRows(plan, pa.schema([("id", pa.int64())]))
    path = Path(plan.folder.full_path("rows.parquet"))
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(PlanError, match=r"its rows are 1, not 2"):
        KnownRows(plan, pa.schema([("id", pa.string())]))
