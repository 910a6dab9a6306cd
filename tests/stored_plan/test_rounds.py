"""A partition that a first round has read is the same for later rounds, or an error."""

import pyarrow as pa
import pytest
from support.lake_tables import DS, Lake, open_lake

from batchllm_operator.errors import StorageError
from batchllm_operator.stored_plan.rounds import PinnedInput


def test_a_pinned_partition_is_read_as_it_was(lake: Lake) -> None:
    lake.append(DS, pa.table({"n": pa.array([1, 2], pa.int64())}))
    taken = open_lake(lake).snapshot(DS)
    pinned = PinnedInput.of(taken)
    assert PinnedInput.from_bytes(pinned.to_bytes(), source="stored") == pinned

    def read() -> list[int]:
        snapshot = pinned.snapshot(taken.version)
        batches = open_lake(lake).scan(snapshot, ["n", open_lake(lake).partition_column])
        return [n for batch in batches for n in batch.column("n").to_pylist()]

    assert read() == [1, 2]
    lake.append("2026-12-31", pa.table({"n": pa.array([3], pa.int64())}))
    assert read() == [1, 2]
    lake.append(DS, pa.table({"n": pa.array([4], pa.int64())}))
    if lake.has_versions:
        assert read() == [1, 2]
        return
    with pytest.raises(StorageError, match="changed"):
        read()
