"""Parts and their ledger: only what is whole counts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.staged_job import claim_attempt

from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import FencedError, StorageError
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PART_SCHEMA, read_ledger, write_part
from batchllm_operator.storage import Folder

PLAN = "0123456789abcdef"


def output(idx: int, *, error: RowError | None = None) -> EngineOutput:
    text = None if error else f"text {idx}"
    return EngineOutput(idx, text, None if error else "stop", 10, 4, 2, error)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open(str(tmp_path / "shard"))


@pytest.fixture
def attempt(folder: Folder) -> Attempt:
    return claim_attempt(folder)


def test_a_part_reads_back_in_request_order(folder: Folder, attempt: Attempt) -> None:
    rows = {7: [70], 5: [50, 51]}
    entry = write_part(attempt, PLAN, 3, [output(7), output(5)], rows, 1.25)
    table = pq.read_table(folder.full_path(entry.path))
    assert table.schema == PART_SCHEMA
    assert table["request_idx"].to_pylist() == [5, 7]
    assert table["row_idxs"].to_pylist() == [[50, 51], [70]]
    assert read_ledger(folder, PLAN) == {3: entry}


def test_counts_leave_failed_requests_out(folder: Folder, attempt: Attempt) -> None:
    rows = {0: [0, 1], 1: [2], 2: [3, 4, 5]}
    outputs = [output(0), output(1), output(2, error=RowError("engine_error", "x"))]
    entry = write_part(attempt, PLAN, 0, outputs, rows, 1.0)
    assert (entry.num_requests, entry.num_rows, entry.num_failed_rows) == (3, 6, 3)
    assert entry.num_logical_tokens == 30
    assert (entry.num_prompt_tokens, entry.num_cached_tokens, entry.num_output_tokens) == (20, 8, 4)


def damage(path: Path, how: str) -> None:
    match how:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "flipped":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def test_a_part_counts_once_and_that_of_the_latest_attempt(folder: Folder) -> None:
    other = EngineOutput(0, "other", "stop", 1, 0, 1, None)
    first, second = claim_attempt(folder), claim_attempt(folder)
    late = write_part(second, PLAN, 0, [other], {0: [0]}, 2.0)
    with pytest.raises(FencedError, match=r"attempt 2 .* has taken over from attempt 1"):
        write_part(first, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    assert read_ledger(folder, PLAN) == {0: late}


def test_an_entry_is_never_replaced(folder: Folder, attempt: Attempt) -> None:
    """As by a storage that doesn't know conditional writes: both believe they are attempt 1."""
    whole = write_part(attempt, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    with pytest.raises(FencedError, match="another process has written it"):
        write_part(attempt, PLAN, 0, [output(0)], {0: [0]}, 2.0)
    assert read_ledger(folder, PLAN) == {0: whole}


def test_a_damaged_part_gives_way_to_an_earlier_one(folder: Folder) -> None:
    """What an attempt leaves is kept, so that the ledger is the union of all of them."""
    early = write_part(claim_attempt(folder), PLAN, 0, [output(0)], {0: [0]}, 1.0)
    late = write_part(claim_attempt(folder), PLAN, 0, [output(0)], {0: [0]}, 2.0)
    assert read_ledger(folder, PLAN) == {0: late}
    damage(Path(folder.full_path(late.path)), "flipped")
    assert read_ledger(folder, PLAN) == {0: early}
    damage(Path(folder.full_path(early.path)), "missing")
    assert read_ledger(folder, PLAN) == {}


def test_an_entry_appears_only_after_its_file(
    folder: Folder, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Folder, source: Path, name: str) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Folder, "publish_file", no_space)
    with pytest.raises(StorageError):
        write_part(attempt, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    assert list(folder.find()) == ["attempt-00001/claim.json"]
