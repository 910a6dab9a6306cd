"""What a scan of a table with large row groups takes: memory, and bytes from S3."""

import io
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake.test_row_stream import DS, MIB, repeated

from batchllm_operator.lake import ParquetTable
from batchllm_operator.storage import Folder

# Prints by how many bytes the peak of resident memory grows while a table is scanned.
SCAN = """
import sys
from pathlib import Path
from batchllm_operator.lake import open_table

def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

table = open_table(sys.argv[1], "ds")
snapshot = table.snapshot(sys.argv[2])
before = peak_kib()
rows = sum(batch.num_rows for batch in table.scan(snapshot, ["id", "doc"]))
print(rows, (peak_kib() - before) * 1024)
"""


@pytest.mark.parametrize("kind", ["plain", "repeated documents"])
def test_memory_doesnt_grow_with_the_row_group(tmp_path: Path, kind: str) -> None:
    """One row group of 240 MiB plain, or of 781 MiB from a file of 1 MiB: at most 180 more."""
    generate = random.Random(0)
    if kind == "plain":
        text = generate.randbytes(120 * MIB).hex()
        docs = pa.array([text[at : at + 4096] for at in range(0, len(text), 4096)])
        del text
    else:
        docs = repeated([generate.randbytes(50_000).hex() for _ in range(8)], 8192)
    file = tmp_path / f"ds={DS}" / "a.parquet"
    file.parent.mkdir()
    data = pa.table({"id": range(len(docs)), "doc": docs})
    pq.write_table(data, file, store_schema=False, compression="none")
    assert pq.read_metadata(file).num_row_groups == 1
    command = [sys.executable, "-c", SCAN, str(tmp_path), DS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_rows, grown_bytes = map(int, done.stdout.split())
    assert num_rows == len(docs)
    assert grown_bytes < 180 * MIB


def test_each_byte_is_fetched_from_s3_once(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are read in turn; reading ahead would fetch the same megabytes for each."""
    from s3fs.core import S3File

    fetched: list[int] = []
    fetch = S3File._fetch_range

    def counted(file: S3File, start: int, end: int) -> bytes:
        fetched.append(end - start)
        data: bytes = fetch(file, start, end)
        return data

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    text = random.Random(0).randbytes(8 * MIB).hex()
    docs = [text[at : at + 4096] for at in range(0, len(text), 4096)]
    data = pa.table({"id": range(len(docs)), "doc": docs, "other": docs})
    sink = io.BytesIO()
    pq.write_table(data, sink, compression="none", use_dictionary=False)
    folder = Folder.open(f"{s3_bucket}/table")
    folder.write_bytes(f"ds={DS}/a.parquet", sink.getvalue())
    table = ParquetTable(folder, "ds")
    snapshot = table.snapshot(DS)
    assert sum(batch.num_rows for batch in table.scan(snapshot, data.schema.names)) == len(docs)
    assert sum(fetched) < 1.02 * len(sink.getvalue())
    assert len(fetched) < 30
