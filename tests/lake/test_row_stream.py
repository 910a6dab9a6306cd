"""A scan's memory: batches of bounded size from row groups of any size."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm_operator.lake.row_stream import joined, read_batches

MIB = 1 << 20
DS = "2026-01-31"


def batches(data: pa.Table, **options: Any) -> list[pa.RecordBatch]:
    """What is read of `data` as one file."""
    file = io.BytesIO()
    pq.write_table(data, file, **options)
    read = list(read_batches(file, data.schema, {}))
    assert pa.Table.from_batches(read, data.schema).to_pylist() == data.to_pylist()
    return read


def sizes_mib(read: Sequence[pa.RecordBatch]) -> list[float]:
    return [batch.nbytes / MIB for batch in read]


def repeated(texts: Sequence[str], num_rows: int) -> pa.Array:
    """`texts` over and over, at the cost of their indices."""
    idxs = pa.array([idx % len(texts) for idx in range(num_rows)], pa.int32())
    return pa.DictionaryArray.from_arrays(idxs, pa.array(texts))


def test_small_rows_come_4096_at_a_time() -> None:
    read = batches(pa.table({"n": range(10_000)}))
    assert [batch.num_rows for batch in read] == [4096, 4096, 1808]


def test_batches_dont_follow_row_groups() -> None:
    read = batches(pa.table({"n": range(10_000)}), row_group_size=300)
    assert [batch.num_rows > 3700 for batch in read] == [True, True, False]


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_large_rows_come_16_mib_at_a_time(use_dictionary: bool) -> None:
    """The footer of the file with a dictionary tells of 1 MiB in all."""
    texts = [chr(ord("a") + idx) * (MIB // 8) for idx in range(8)]
    data = pa.table({"doc": repeated(texts, 400).dictionary_decode()})
    read = batches(data, use_dictionary=use_dictionary)
    assert max(sizes_mib(read)) <= 16
    assert min(sizes_mib(read)[:-1]) > 12


def test_rows_that_grow_within_a_row_group() -> None:
    read = batches(pa.table({"doc": ["x" * (idx * 200) for idx in range(1000)]}))
    assert max(sizes_mib(read)) <= 16
    assert min(sizes_mib(read)[:-1]) > 12


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_rows_larger_than_a_batch_come_alone(use_dictionary: bool) -> None:
    texts = ["a" * (17 * MIB), "b", "c" * (17 * MIB), "d", "e"]
    read = batches(pa.table({"doc": texts}), use_dictionary=use_dictionary)
    assert [batch.num_rows for batch in read] == [1, 1, 1, 2]


def test_dictionaries_count_as_what_they_stand_for() -> None:
    data = pa.table({"doc": repeated(["x" * (MIB // 4), "y" * (MIB // 4)], 200)})
    read = batches(data)
    assert max(batch.num_rows for batch in read) <= 64  # of 256 KiB
    assert len(read) <= 5
    assert read[0].schema == data.schema


def test_small_batches_are_joined_and_large_ones_are_left() -> None:
    small = [pa.record_batch({"n": [idx, idx]}) for idx in range(5000)]
    large = pa.record_batch({"n": np.arange(MIB)})
    found = list(joined([*small, large, *small[:2]]))
    assert [batch.num_rows for batch in found] == [4096, 4096, 1808, MIB, 4]
    assert found[3] is large
    rows = [n for batch in found[:3] for n in batch.column(0).to_pylist()]
    assert rows == [idx for idx in range(5000) for _ in range(2)]
    wide = [pa.record_batch({"text": ["x" * (MIB // 3)]}) for _ in range(5)]
    assert [batch.num_rows for batch in joined(wide)] == [2, 2, 1]
    assert list(joined([])) == []
