"""Parts and their ledger: only what is whole counts."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.staged_job import claim_attempt

from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import FencedError, StorageError
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PART_SCHEMA, PartOutputs, ShardFiles
from batchllm_operator.storage import Folder

PLAN = "0123456789abcdef"


def output(idx: int, *, error: RowError | None = None) -> EngineOutput:
    text = None if error else f"text {idx}"
    return EngineOutput(idx, text, None if error else "stop", 10, 4, 2, error)


def part(*outputs: EngineOutput, engine_s: float = 1.0) -> PartOutputs:
    """Of requests that stand for a row with their own number, and request 5 for one more."""
    by_idx = {output.request_idx: output for output in outputs}
    return PartOutputs(by_idx, {idx: [idx, 50] if idx == 5 else [idx] for idx in by_idx}, engine_s)


@pytest.fixture
def files(tmp_path: Path) -> ShardFiles:
    return ShardFiles(Folder.open(str(tmp_path / "shard")), PLAN, 0, PART_SCHEMA)


@pytest.fixture
def attempt(files: ShardFiles) -> Attempt:
    return claim_attempt(files.folder)


def test_a_part_reads_back_in_request_order(files: ShardFiles, attempt: Attempt) -> None:
    entry = files.write_part(attempt, 3, part(output(7), output(5)))
    table = pq.read_table(files.folder.full_path(entry.path))
    assert table.schema == PART_SCHEMA
    assert table["request_idx"].to_pylist() == [5, 7]
    assert table["row_idxs"].to_pylist() == [[5, 50], [7]]
    assert files.ledger() == {3: entry}


def test_counts_leave_failed_requests_out(files: ShardFiles, attempt: Attempt) -> None:
    failed = output(2, error=RowError("engine_error", "x"))
    entry = files.write_part(attempt, 0, part(output(5), output(1), failed))
    assert (entry.num_requests, entry.num_rows, entry.num_failed_rows) == (3, 4, 1)
    assert entry.num_logical_tokens == 30
    assert (entry.num_prompt_tokens, entry.num_cached_tokens, entry.num_output_tokens) == (20, 8, 4)


def test_an_entry_is_never_replaced(files: ShardFiles, attempt: Attempt) -> None:
    """As by a storage that doesn't know conditional writes: both believe they are attempt 1."""
    whole = files.write_part(attempt, 0, part(output(0)))
    with pytest.raises(FencedError, match="another process has written it"):
        files.write_part(attempt, 0, part(output(0), engine_s=2.0))
    assert files.ledger() == {0: whole}


def test_a_damaged_part_gives_way_to_an_earlier_one(files: ShardFiles) -> None:
    """What an attempt leaves is kept, so that the ledger is the union of all of them."""
    early, late = (
        files.write_part(claim_attempt(files.folder), 0, part(output(0))) for _ in range(2)
    )
    assert files.ledger() == {0: late}
    path = Path(files.folder.full_path(late.path))
    path.write_bytes(path.read_bytes()[:-1])
    assert files.ledger() == {0: early}
    files.folder.remove(early.path)
    assert files.ledger() == {}


def test_an_entry_appears_only_after_its_file(
    files: ShardFiles, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Folder, source: Path, name: str) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Folder, "publish_file", no_space)
    with pytest.raises(StorageError):
        files.write_part(attempt, 0, part(output(0)))
    assert list(files.folder.find()) == ["attempt-00001/claim.json"]
