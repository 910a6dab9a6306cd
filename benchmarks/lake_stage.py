"""One step of `benchmarks.lake`, in a process of its own: its time, its peak memory, its end.

    python -m benchmarks.lake_stage RESULT ROOT FORMAT STEP [ARG ...]

STEP is `input` (write the table), `write` (the published rows again, by pyarrow alone), `check`
(the published rows against the input), or a command of `batchllm` with its arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.cli import main as batchllm
from benchmarks.faults.tables import FORMATS, Tables
from benchmarks.memory import peak_rss_bytes

SHARE_DEGREE: Final = 8
_DOCUMENT_CHARACTERS: Final = 200
_INPUT_CHUNK: Final = 100_000
_COMPRESSIONS: Final = ("zstd", "snappy")  # ours, and pyarrow's own choice


def make_input(tables: Tables, num_rows: int, seed: int) -> dict[str, Any]:
    """Rows in random order, of which `SHARE_DEGREE` ask about the same document."""
    order = np.random.default_rng(seed).permutation(num_rows)
    chunks = []
    for start in range(0, num_rows, _INPUT_CHUNK):
        idxs = order[start : start + _INPUT_CHUNK].tolist()
        rows = {"row_key": [f"row-{idx}" for idx in idxs]}
        documents = (f"Document {idx // SHARE_DEGREE}: " for idx in idxs)
        rows["document"] = [text.ljust(_DOCUMENT_CHARACTERS, "d") for text in documents]
        rows["query"] = [f"What does number {idx} say?" for idx in idxs]
        chunks.append(pa.table(rows))
    tables.replace_input(pa.concat_tables(chunks))
    return {}


def write_again(tables: Tables, folder: Path) -> dict[str, Any]:
    """Seconds that pyarrow takes to write what is published into one file, for each compression.

    The rows are in memory, nothing is checked, and nothing is forced to the disk.
    """
    table, path = tables.output(), folder / "again.parquet"
    seconds = {}
    for compression in _COMPRESSIONS:
        started_at = time.perf_counter()
        pq.write_table(table, path, compression=compression)
        seconds[compression] = time.perf_counter() - started_at
        path.unlink()
    return {"write_s": seconds}


def check(tables: Tables, num_rows: int, num_characters: int) -> dict[str, Any]:
    """Stop unless each input row has one text of that length."""
    table = tables.output()
    numbers = pc.cast(pc.utf8_slice_codeunits(table["row_key"], 4), pa.int64()).to_numpy()
    lengths = pc.unique(pc.utf8_length(table["generated_text"])).to_pylist()
    if not np.array_equal(np.sort(numbers), np.arange(num_rows)) or lengths != [num_characters]:
        sys.exit("the published rows aren't those of the input; no figures")
    return {}


def run(root: Path, table_format: str, step: str, args: list[str]) -> dict[str, Any]:
    """Do the step; what there is to say of it."""
    if step not in ("input", "write", "check"):
        if code := batchllm([step, *args]):
            sys.exit(f"{step} ended with {code}; no figures")
        return {}
    tables = FORMATS[table_format](root, None)
    if step == "input":
        return make_input(tables, int(args[0]), int(args[1]))
    if step == "write":
        return write_again(tables, root)
    return check(tables, int(args[0]), int(args[1]))


def main() -> None:
    result, root, table_format, step, *args = sys.argv[1:]
    if step == "commit":  # as pyarrow is there before its time is taken
        import batchllm_operator.commit.commit_run  # noqa: F401
    started_at, cpu_before = time.perf_counter(), time.process_time()
    found = run(Path(root), table_format, step, args)
    found |= {
        "wall_s": time.perf_counter() - started_at,
        "cpu_s": time.process_time() - cpu_before,
        "peak_bytes": peak_rss_bytes(),
    }
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    if step in ("check", "write"):
        # The format's own reader (deltalake's, over pyarrow's threads) can abort a process's end.
        os._exit(0)


if __name__ == "__main__":
    main()
