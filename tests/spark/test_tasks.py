"""What tasks are given: their items keep the values of partition columns."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import TypeAdapter
from pyiceberg.types import IcebergType, TimestampType, TimestamptzType

from batchllm_operator.lake import FilePart
from batchllm_operator.lake.iceberg.schema import python_value
from batchllm_operator.lake.row_stream import scalar_of
from batchllm_operator.lake.table import InputFile
from batchllm_operator.spark.reading import Part
from batchllm_operator.spark.tasks import encoded

VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.string(), "eu"),
    (pa.int64(), 2**62),
    (pa.bool_(), True),
    (pa.date32(), date(26, 1, 1)),
    (pa.timestamp("us"), datetime(2026, 1, 1, 0, 0, 0, 5)),
    (pa.timestamp("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.decimal128(9, 2), Decimal("1.50")),
    (pa.float64(), -math.inf),
    (pa.binary(), b"\xff\x00"),
    (pa.binary(2), b"\xff\x00"),
    (pa.uuid(), UUID(int=5)),
    (pa.int64(), None),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=str)
def test_a_task_reads_the_value_that_the_driver_has(kind: pa.DataType, value: Any) -> None:
    part = Part(0, (FilePart(InputFile("a.parquet", 1, 1, values={"region": value})),))
    item = TypeAdapter(Part).validate_json(encoded(part))
    read = item.pieces[0].file.values["region"]
    assert scalar_of(read, kind).equals(scalar_of(value, kind))


@pytest.mark.parametrize(
    ("iceberg", "kind"),
    [(TimestampType(), pa.timestamp("us")), (TimestamptzType(), pa.timestamp("us", "UTC"))],
    ids=str,
)
def test_times_of_iceberg_keep_their_zone(iceberg: IcebergType, kind: pa.DataType) -> None:
    read = TypeAdapter(Any).validate_json(encoded(python_value(iceberg, 5)))
    assert scalar_of(read, kind).equals(pa.scalar(5, kind))
