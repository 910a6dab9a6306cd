"""Batches of bounded size out of row groups of any size."""

from __future__ import annotations

import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm_operator.lake.parquet_stream import BATCH_BYTES, BATCH_ROWS, read_batches

MIB = 1 << 20

SCAN_AND_REPORT = """
import re, sys
from batchllm_operator.lake.parquet import ParquetTable
from batchllm_operator.lake.folder import Folder
def status(name):
    found = re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())
    return int(found.group(1)) * 1024
table = ParquetTable(Folder.open(sys.argv[1]), "ds")
snapshot = table.snapshot("d")
before, num_bytes = status("VmRSS"), 0
for batch in table.scan(snapshot, ["key", "document"]):
    num_bytes += batch.nbytes
print(num_bytes, status("VmHWM") - before)
"""


def stored(table: pa.Table, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    file.seek(0)
    return file


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("num_documents", [50, 10_000])
def test_memory_does_not_grow_with_row_groups(tmp_path: Path, num_documents: int) -> None:
    """One row group of 480 MiB, of documents that are in its dictionary, or not."""
    documents = [f"{n:>9} is what this document is about " * 320 for n in range(num_documents)]
    names = pa.array(range(40_000))
    texts = pa.DictionaryArray.from_arrays(
        pa.array([n * 7919 % num_documents for n in range(40_000)], pa.int32()), documents
    )
    folder = tmp_path / "ds=d"
    folder.mkdir()
    pq.write_table(
        pa.table({"key": names, "document": texts.cast(pa.large_string())}), folder / "a.parquet"
    )
    assert pq.read_metadata(folder / "a.parquet").num_row_groups == 1
    command = [sys.executable, "-P", "-c", SCAN_AND_REPORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes, growth = map(int, done.stdout.split())
    assert num_bytes > 460 * MIB
    assert growth < 160 * MIB


@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("num_chars", [1, 3000, 100_000])
def test_batches_are_as_large_as_they_may_be(num_chars: int, use_dictionary: bool) -> None:
    num_rows = min(10_000, 60 * MIB // num_chars)
    texts = [str(n % 50) * num_chars for n in range(num_rows)]
    table = pa.table({"text": [text[:num_chars] for text in texts], "n": range(num_rows)})
    file = stored(table, use_dictionary=use_dictionary)
    batches = list(read_batches(file, table.schema, ["text", "n"], {}))
    assert pa.Table.from_batches(batches).equals(table)
    assert all(batch.num_rows <= BATCH_ROWS for batch in batches)
    assert all(batch.nbytes <= 1.1 * BATCH_BYTES for batch in batches)
    for one, following in pairwise(batches):
        assert one.num_rows + following.num_rows > BATCH_ROWS or (
            one.nbytes + following.nbytes > 0.6 * BATCH_BYTES
        )


def test_columns_get_the_types_asked_for() -> None:
    file = stored(pa.table({"a": pa.array([1, 2], pa.int32()), "ds": ["not this", "nor this"]}))
    schema = pa.schema(
        [("a", pa.int64()), ("b", pa.string()), ("ds", pa.string()), ("c", pa.list_(pa.int64()))]
    )
    [batch] = read_batches(file, schema, ["ds", "c", "b", "a"], {"ds": "d"})
    assert batch.schema == pa.schema([schema.field(name) for name in ("ds", "c", "b", "a")])
    assert batch.to_pylist() == [
        {"ds": "d", "c": None, "b": None, "a": 1},
        {"ds": "d", "c": None, "b": None, "a": 2},
    ]


def test_rows_of_no_column_are_rows() -> None:
    file = stored(pa.table({"a": range(5000)}))
    schema = pa.schema([("b", pa.string()), ("ds", pa.string())])
    batches = list(read_batches(file, schema, ["b", "ds"], {"ds": "d"}))
    assert sum(batch.num_rows for batch in batches) == 5000
    assert batches[0].slice(0, 1).to_pylist() == [{"b": None, "ds": "d"}]


def test_a_value_that_does_not_fit_the_type_is_an_error() -> None:
    file = stored(pa.table({"a": ["x"]}))
    with pytest.raises(pa.ArrowInvalid):
        list(read_batches(file, pa.schema([("a", pa.int64())]), ["a"], {}))


def test_an_empty_file_has_no_batches() -> None:
    table = pa.table({"a": pa.array([], pa.int64())})
    assert list(read_batches(stored(table), table.schema, ["a"], {})) == []
