"""Row groups and files of published rows: as large as readers like them, and no larger."""

import random
import string
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm_operator.lake import data_files, gather, write_files

MOST = 1 << 20  # of a row group, here
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string()), ("run_id", pa.string())])
RUN_ID = pa.repeat("a run's identifier, which all rows share", 5000)
UNLIKE = "".join(random.Random(0).choices(string.printable, k=1 << 20))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_GROUP_BYTES", MOST)


def tables(num_rows: int, num_characters: int, *, unlike: bool, each: int) -> Iterator[pa.Table]:
    """Rows with texts that are unlike each other, or all the same."""
    for start in range(0, num_rows, each):
        numbers = range(start, min(num_rows, start + each))
        places = [(number * 7919 if unlike else 0) % (1 << 19) for number in numbers]
        texts = [UNLIKE[place : place + num_characters] for place in places]
        run_ids = RUN_ID.slice(0, len(texts))
        yield pa.table([pa.array(numbers), pa.array(texts), run_ids], schema=SCHEMA)


def check_rows(paths: list[Path], num_rows: int) -> list[pq.FileMetaData]:
    found = pa.concat_tables(pq.ParquetFile(path).read() for path in paths)
    assert found.schema == SCHEMA
    assert found["n"].to_pylist() == list(range(num_rows))
    return [pq.read_metadata(path) for path in paths]


def group_bytes(footer: pq.FileMetaData) -> list[int]:
    return [footer.row_group(idx).total_byte_size for idx in range(footer.num_row_groups)]


@pytest.mark.parametrize(
    ("num_rows", "num_characters", "each"),
    [
        (6_000, 500, 100),
        (6_000, 500, 5000),  # each table is more than a group
        (30, 100_000, 7),
        (8, 1 << 19, 1),
    ],
)
def test_row_groups_are_half_full_at_least_and_never_too_large(
    tmp_path: Path, num_rows: int, num_characters: int, each: int
) -> None:
    groups = gather(tables(num_rows, num_characters, unlike=True, each=each))
    [footer] = check_rows(write_files(groups, tmp_path / "a", SCHEMA, None), num_rows)
    *sizes, last = group_bytes(footer)
    assert len(sizes) >= 2
    assert all(MOST // 3 <= size <= MOST for size in sizes), sizes
    assert last <= MOST


def test_rows_that_wait_are_bounded() -> None:
    num_read = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal num_read
        for table in tables(100_000, 1000, unlike=False, each=100):
            num_read += table.num_rows
            yield table

    first = next(gather(counted()))
    assert MOST // 2 < first.nbytes <= MOST
    assert num_read == first.num_rows + 100


@pytest.mark.parametrize("num_characters", [200, 20_000])
def test_files_are_never_larger_than_asked_for(tmp_path: Path, num_characters: int) -> None:
    most = 1 << 20
    num_rows = 6_000_000 // num_characters
    given = tables(num_rows, num_characters, unlike=True, each=50)
    paths = write_files(gather(given, most), tmp_path / "a", SCHEMA, most)
    check_rows(paths, num_rows)
    assert [path.name for path in paths] == [f"{idx:05d}.parquet" for idx in range(len(paths))]
    sizes = [path.stat().st_size for path in paths]
    assert len(sizes) > 3
    assert max(sizes) <= most
    assert min(sizes[:-1]) > most // 2


def test_bounds_of_nested_texts_count(tmp_path: Path) -> None:
    """Each may be 4 KiB, in the footer and in a page, as often as a row group has such a part."""
    most, draw = 8 << 20, random.Random(0)
    columns = [[draw.randbytes(2000).hex() for _ in range(300)] for _ in range(60)]
    parts = pa.StructArray.from_arrays(map(pa.array, columns), names=list(map(str, range(60))))
    data = pa.table({"parts": parts})
    paths = write_files(gather([data], most), tmp_path / "a", data.schema, most)
    assert sum(pq.read_metadata(path).num_rows for path in paths) == 300 > 10 * len(paths)
    assert max(path.stat().st_size for path in paths) <= most


def test_a_large_dictionary_is_cut_with_its_rows(tmp_path: Path) -> None:
    most = 1 << 20
    texts = [UNLIKE[place : place + 100] for place in range(0, 500_000, 100)]
    column = pa.array([*texts, None]).dictionary_encode()
    data = pa.table({"text": column.take(pa.array([(n * 7919) % 5001 for n in range(9000)]))})
    pieces = [data.slice(start, 1000) for start in range(0, 9000, 1000)]
    paths = write_files(gather(pieces, most), tmp_path / "a", data.schema, most)
    assert pa.concat_tables(map(pq.read_table, paths)).to_pydict() == data.to_pydict()
    footers = [pq.read_metadata(path) for path in paths]
    assert sum(footer.num_row_groups for footer in footers) <= 9
    assert max(path.stat().st_size for path in paths) <= most
    assert pq.read_schema(paths[0]) == data.schema


def test_a_row_that_is_too_large_has_a_file_of_its_own(tmp_path: Path) -> None:
    most = 100_000
    given = tables(4, 300_000, unlike=True, each=3)
    paths = write_files(gather(given, most), tmp_path / "a", SCHEMA, most)
    footers = check_rows(paths, 4)
    assert [footer.num_rows for footer in footers] == [1, 1, 1, 1]


def test_no_rows_are_a_file_without_rows(tmp_path: Path) -> None:
    for name, rows in (("nothing", []), ("empty", [SCHEMA.empty_table()])):
        [path] = write_files(gather(rows, MOST), tmp_path / name, SCHEMA, MOST)
        assert pq.read_table(path).num_rows == 0
        assert pq.read_schema(path) == SCHEMA
        assert data_files.files_of(tmp_path / name) == [path] == data_files.files_of(path)


def test_a_failure_while_rows_are_made_ends_the_files(tmp_path: Path) -> None:
    def broken() -> Iterator[pa.Table]:
        yield from tables(10_000, 500, unlike=True, each=1000)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_files(gather(broken(), MOST), tmp_path / "a", SCHEMA, MOST)
    assert all(first < second for first, second in pairwise(data_files.files_of(tmp_path / "a")))
