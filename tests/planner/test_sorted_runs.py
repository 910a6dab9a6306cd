"""The external sort against Python's own, with runs and buffers of all sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.spilling import file_size_limit

from batchllm_operator.planner import TokenTable
from batchllm_operator.planner.prefixes.row_sort import SortedRows
from batchllm_operator.planner.prefixes.sorted_runs import RowSorter

# Few symbols, so that rows of different runs are often equal or extend one another.
ROWS = st.lists(st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=7), max_size=40)


def sort(rows: list[list[int]], folder: Path | None, run_bytes: int, batch: int) -> SortedRows:
    sorter = RowSorter(folder, run_bytes=run_bytes, merge_bytes=1)
    for start in range(0, len(rows), batch):
        sorter.add(TokenTable.from_lists(rows[start : start + batch]))
    done: list[int] = []
    result = sorter.sort(done.append)
    assert sum(done) == len(rows)
    return result


def common(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@settings(deadline=None)
@given(ROWS, st.integers(1, 3000), st.integers(1, 9))
@example([[1, 2], [1], [1, 2], [], [1, 2, 3], []], 1, 1)
@example([], 1, 1)
def test_rows_are_sorted_wherever_runs_end(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], run_bytes: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    found = sort(rows, folder, run_bytes, batch)
    expected = sorted(range(len(rows)), key=lambda idx: (rows[idx], idx))
    assert found.row_idxs.tolist() == expected
    shared = [0, *(common(rows[a], rows[b]) for a, b in pairwise(expected))]
    assert found.num_shared.tolist() == shared[: len(rows)]
    assert list(folder.iterdir()) == []


def test_without_a_folder_all_stays_in_memory() -> None:
    rows = [[3], [1], [2]]
    assert sort(rows, None, 1, 1).row_idxs.tolist() == [1, 2, 0]


def test_what_a_merge_needs_is_known(tmp_path: Path) -> None:
    sorter = RowSorter(tmp_path, run_bytes=1, merge_bytes=1)
    assert sorter.min_merge_bytes == 0
    sorter.add(TokenTable.from_lists([[1] * 10]))
    sorter.add(TokenTable.from_lists([[1] * 97]))
    assert sorter.min_merge_bytes == 2 * (97 + 3) * 4


def test_the_buffer_stays_what_it_is_where_there_is_a_disk(tmp_path: Path) -> None:
    """Long rows fill it before their bytes are enough for a run."""
    sorter = RowSorter(tmp_path, run_bytes=40_000, merge_bytes=1 << 20)
    rows = np.random.default_rng(0).integers(0, 9, (60, 700), dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowSorter, "_reserve", lambda *_: pytest.fail("the buffer grows"))
        for row in rows:
            sorter.add(TokenTable.from_lists([row]))
    assert len(list(tmp_path.iterdir())) > 1
    expected = sorted(range(60), key=lambda idx: rows[idx].tolist())
    assert sorter.sort(lambda _: None).row_idxs.tolist() == expected
    assert list(tmp_path.iterdir()) == []


def test_runs_of_a_sorter_that_is_given_up_are_removed(tmp_path: Path) -> None:
    sorter = RowSorter(tmp_path, run_bytes=1, merge_bytes=1)
    sorter.add(TokenTable.from_lists([[1], [2]]))
    assert len(list(tmp_path.iterdir())) == 1
    sorter.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    sorter = RowSorter(tmp_path, run_bytes=1, merge_bytes=1)
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        sorter.add(TokenTable.from_lists([[1] * 1000]))
