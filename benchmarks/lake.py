"""Memory and time of the stages over large tables: `python -m benchmarks.lake`.

For each format and number of rows, on the local disk, a job with the fake engine and texts of 500
characters is taken through plan, run and commit, each in a process of its own:

    peak_bytes     most memory that the process held, Python and its libraries included
    growth         that of the largest table divided by that of the smallest
    commit_s       the commit, once what it needs is imported
    write_s        pyarrow writes the same rows, which it has in memory, into one Parquet file
    commit_ratio   commit_s over write_s with the same compression (zstd), which is the median of
                   `--repetitions` pairs; `commit_ratio_vs_snappy`: with pyarrow's own choice

One commit and one write take turns, from the same finished run. The published rows are compared
with the input's before any figure is printed.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.faults.tables import DS, FORMATS, Tables, set_environment
from benchmarks.memory import peak_rss_bytes
from benchmarks.provenance import print_last_line, provenance

CHARACTERS: Final = 500
"""Of each output."""
SHARE_DEGREE: Final = 8
_DOCUMENT_CHARACTERS: Final = 200
_INPUT_CHUNK: Final = 100_000
_COMPRESSIONS: Final = ("zstd", "snappy")  # ours, and pyarrow's own choice
_GIB: Final = 1 << 30
_STAGES: Final = ("plan", "run", "commit")


class Stage(NamedTuple):
    """What a process did, and what it took."""

    result: Any
    wall_s: float
    peak_bytes: int


def timed(run: Callable[..., Any], *args: Any) -> Stage:
    """Run this here."""
    started_at = time.perf_counter()
    result = run(*args)
    return Stage(result, time.perf_counter() - started_at, peak_rss_bytes())


class Job:
    """A job over one table in a folder of its own, with outputs of so many characters."""

    def __init__(self, root: Path, table_format: str, characters: int = CHARACTERS) -> None:
        self.root, self.characters = root, characters
        self._format = table_format
        (root / "tmp").mkdir(parents=True)
        (root / "lake").mkdir()

    @property
    def tables(self) -> Tables:
        """As they lie there now."""
        return FORMATS[self._format](self.root, None)

    def step(self, run: Callable[..., Any], *args: Any) -> Stage:
        """Run this in a process of its own, which has imported what pickle needs of it."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, set_environment, (self.root, None)) as pool:
            return pool.submit(timed, run, *args).result()

    def spec(self) -> str:
        """The job as JSON."""
        extra = {"byte_tokens": True, "num_characters": self.characters, "max_in_flight": 256}
        staging = f"{self.root}/lake/staging"
        fields = {
            "spec_version": 1,
            "name": "job",
            "input": {"uri": self.tables.address("documents"), "key": "row_key"},
            "prompt": {"template": "{document}\n\n{query}"},
            "model": {"path": "no-model"},
            "sampling": {"max_tokens": 128},
            "output": {"uri": self.tables.address("out"), "staging_uri": staging},
            "engine": {"backend": "fake", "extra_args": extra},
        }
        return json.dumps(fields)

    def remember(self) -> None:
        """Keep what there is, for `restore`."""
        shutil.copytree(self.root, self._saved)

    def restore(self) -> None:
        """Put back what there was, on the disk and not only in its cache."""
        shutil.rmtree(self.root)
        shutil.copytree(self._saved, self.root)
        os.sync()

    @property
    def _saved(self) -> Path:
        return self.root.with_name(f"{self.root.name}-saved")


# Each in a process of its own; what it takes to import a stage counts, but for the commit.


def make_input(job: Job, num_rows: int) -> None:
    """Rows in random order, of which `SHARE_DEGREE` ask about the same document."""
    order = np.random.default_rng(0).permutation(num_rows)
    chunks = []
    for start in range(0, num_rows, _INPUT_CHUNK):
        idxs = order[start : start + _INPUT_CHUNK].tolist()
        rows = {"row_key": [f"row-{idx}" for idx in idxs]}
        documents = (f"Document {idx // SHARE_DEGREE}: " for idx in idxs)
        rows["document"] = [text.ljust(_DOCUMENT_CHARACTERS, "d") for text in documents]
        rows["query"] = [f"What does number {idx} say?" for idx in idxs]
        chunks.append(pa.table(rows))
    job.tables.replace_input(pa.concat_tables(chunks))


def plan(spec: str) -> str:
    """Plan the job; the plan's URI."""
    from batchllm_operator.plan.plan_job import plan_job
    from batchllm_operator.spec.loading import parse_spec_json

    return plan_job(parse_spec_json(spec, source="benchmark"), DS).folder.uri


def run(plan_uri: str) -> None:
    """Run all shards."""
    from batchllm_operator.run.run_shards import run_worker

    run_worker(plan_uri)


def check(job: Job, num_rows: int) -> None:
    """Stop unless each input row has one text of that length."""
    table = job.tables.output()
    numbers = pc.cast(pc.utf8_slice_codeunits(table["row_key"], 4), pa.int64()).to_numpy()
    lengths = pc.unique(pc.utf8_length(table["generated_text"])).to_pylist()
    if not np.array_equal(np.sort(numbers), np.arange(num_rows)) or lengths != [job.characters]:
        sys.exit("the published rows aren't those of the input; no figures")


def write_again(job: Job) -> dict[str, float]:
    """Seconds that pyarrow takes to write what is published into one file, for each compression.

    The rows are in memory, nothing is checked, and nothing is forced to the disk.
    """
    table, path = job.tables.output(), job.root / "again.parquet"
    seconds = {}
    for compression in _COMPRESSIONS:
        started_at = time.perf_counter()
        pq.write_table(table, path, compression=compression)
        seconds[compression] = time.perf_counter() - started_at
        path.unlink()
    return seconds


def measure(root: Path, table_format: str, num_rows: int, repetitions: int) -> dict[str, Any]:
    """All figures of one table."""
    from batchllm_operator.commit.commit_run import commit_run

    job = Job(root, table_format)
    job.step(make_input, job, num_rows)
    stages = {"plan": job.step(plan, job.spec())}
    plan_uri = stages["plan"].result
    stages["run"] = job.step(run, plan_uri)
    job.remember()
    commits: list[Stage] = []
    writes: list[dict[str, float]] = []
    for repetition in range(repetitions):
        if repetition:
            job.restore()
        commits.append(job.step(commit_run, plan_uri))
        if not repetition:
            job.step(check, job, num_rows)
        os.sync()
        writes.append(job.step(write_again, job).result)
    commit_s = [commit.wall_s for commit in commits]
    peak_bytes = max(commit.peak_bytes for commit in commits)
    stages["commit"] = Stage(None, statistics.median(commit_s), peak_bytes)
    write_s = {name: [seconds[name] for seconds in writes] for name in _COMPRESSIONS}
    ratios = {
        name: round(statistics.median(np.divide(commit_s, seconds).tolist()), 2)
        for name, seconds in write_s.items()
    }
    return {
        "format": table_format,
        "num_rows": num_rows,
        "peak_bytes": {name: stages[name].peak_bytes for name in _STAGES},
        "wall_s": {name: round(stages[name].wall_s, 2) for name in _STAGES},
        "commit_s": np.round(commit_s, 2).tolist(),
        "write_s": {name: np.round(seconds, 2).tolist() for name, seconds in write_s.items()},
        "commit_ratio": ratios["zstd"],
        "commit_ratio_vs_snappy": ratios["snappy"],
    }


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By format and stage: peak memory of the largest table over that of the smallest."""
    growths = {}
    for table_format in {row["format"]: None for row in rows}:
        chosen = [row for row in rows if row["format"] == table_format]
        chosen.sort(key=lambda row: row["num_rows"])
        least, most = chosen[0]["peak_bytes"], chosen[-1]["peak_bytes"]
        growths[table_format] = {name: round(most[name] / least[name], 2) for name in _STAGES}
    return growths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="100000,1000000", help="of each table, by commas")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of commit and write")
    parser.add_argument("--root", type=Path, help="folder on the disk to measure")
    args = parser.parse_args()
    started_at = time.monotonic()
    rows = []
    sizes = sorted(map(int, args.rows.split(",")))
    for table_format in args.formats.split(","):
        for num_rows in sizes:
            with tempfile.TemporaryDirectory(prefix="batchllm-lake-", dir=args.root) as folder:
                rows.append(measure(Path(folder, "job"), table_format, num_rows, args.repetitions))
            print(json.dumps(rows[-1]), file=sys.stderr)
    most = sizes[-1]
    report = {
        "benchmark": "lake",
        "characters": CHARACTERS,
        "repetitions": args.repetitions,
        "rows": rows,
        "growth": growth(rows),
        "peak_gib": {
            name: round(max(row["peak_bytes"][name] for row in rows) / _GIB, 2) for name in _STAGES
        },
        "commit_ratio": {r["format"]: r["commit_ratio"] for r in rows if r["num_rows"] == most},
        **provenance(),
        "wall_s": round(time.monotonic() - started_at, 1),
    }
    print_last_line(report)


if __name__ == "__main__":
    main()
