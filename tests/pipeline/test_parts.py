"""Parts and their ledger: only what is whole counts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchllm_operator.engine import EngineOutput
from batchllm_operator.errors import StorageError
from batchllm_operator.lake import Folder
from batchllm_operator.pipeline.parts import PART_SCHEMA, read_ledger, write_part

PLAN = "0123456789abcdef"


def output(idx: int, *, error: str | None = None) -> EngineOutput:
    text = None if error else f"text {idx}"
    return EngineOutput(idx, text, None if error else "stop", 10, 4, 2, error)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open(str(tmp_path / "shard"))


def test_a_part_reads_back_in_request_order(folder: Folder) -> None:
    rows = {7: [70], 5: [50, 51]}
    entry = write_part(folder, PLAN, 3, [output(7), output(5)], rows, 1.25)
    table = pq.read_table(folder.full_path(entry.file))
    assert table.schema == PART_SCHEMA
    assert table["request_idx"].to_pylist() == [5, 7]
    assert table["row_idxs"].to_pylist() == [[50, 51], [70]]
    assert read_ledger(folder, PLAN) == {3: entry}


def test_counts_leave_failed_requests_out(folder: Folder) -> None:
    rows = {0: [0, 1], 1: [2], 2: [3, 4, 5]}
    outputs = [output(0), output(1), output(2, error="engine_error: x")]
    entry = write_part(folder, PLAN, 0, outputs, rows, 1.0)
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


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_a_damaged_part_does_not_count(folder: Folder, how: str) -> None:
    whole = write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    damaged = write_part(folder, PLAN, 1, [output(1)], {1: [1]}, 1.0)
    damage(Path(folder.full_path(damaged.file)), how)
    assert read_ledger(folder, PLAN) == {0: whole}


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"entry_version": 2}', b"\xff"])
def test_an_unreadable_entry_does_not_count(folder: Folder, content: bytes) -> None:
    write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    folder.write_bytes("part-00000.json", content)
    assert read_ledger(folder, PLAN) == {}


def test_a_renamed_entry_does_not_count(folder: Folder) -> None:
    write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    folder.write_bytes("part-00005.json", folder.read_bytes("part-00000.json"))
    assert set(read_ledger(folder, PLAN)) == {0}


def test_two_writers_of_one_part_leave_one_that_counts(folder: Folder) -> None:
    first = write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    second = write_part(
        folder, PLAN, 0, [EngineOutput(0, "other", "stop", 1, 0, 1, None)], {0: [0]}, 2.0
    )
    assert first.file != second.file
    assert read_ledger(folder, PLAN) == {0: second}


def test_nothing_there_is_an_empty_ledger(folder: Folder) -> None:
    assert read_ledger(folder, PLAN) == {}


def test_an_entry_appears_only_after_its_file(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Folder, source: Path, name: str) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(Folder, "publish_file", no_space)
    with pytest.raises(StorageError):
        write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    assert folder.find() == {}


def test_parts_of_another_plan_do_not_count(folder: Folder) -> None:
    write_part(folder, PLAN, 0, [output(0)], {0: [0]}, 1.0)
    assert read_ledger(folder, "another") == {}
