"""Memory and time of the stages over large tables: `python -m benchmarks.lake`.

For each format and number of rows, on the local disk, a job with the fake engine and texts of
`--characters` is taken through plan, run and commit, each in a process of its own (`lake_stage`):

    peak_bytes     most memory that the process held, Python and its libraries included
    growth         that of the largest table divided by that of the smallest
    commit_s       the command `commit`, once what it needs is imported
    write_s        pyarrow writes the same rows, which it has in memory, into one Parquet file
    commit_ratio   commit_s over write_s with the same compression (zstd), which is the median of
                   `--repetitions` pairs; `commit_ratio_vs_snappy`: with pyarrow's own choice

One commit and one write take turns, from the same finished run. The published rows are compared
with the input's before any figure is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.faults.tables import DS, FORMATS, environment
from benchmarks.provenance import provenance

_GIB: Final = 1 << 30
_STAGES: Final = ("plan", "run", "commit")


class Job:
    """A job over one table in a folder of its own."""

    def __init__(self, root: Path, table_format: str, args: argparse.Namespace) -> None:
        self._root, self._format = root, table_format
        self._num_characters = args.characters
        (root / "tmp").mkdir(parents=True)
        (root / "lake").mkdir()
        self._env = os.environ | environment(root, None)
        self.plan_uri = ""

    def step(self, name: str, *args: str) -> dict[str, Any]:
        """Do one in another process; see `lake_stage`."""
        result = self._root / "result.json"
        command = [sys.executable, "-m", "benchmarks.lake_stage"]
        command += [str(result), str(self._root), self._format, name, *args]
        done = subprocess.run(
            command, env=self._env, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{self._format}: {name} failed\n{done.stderr}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def spec(self) -> str:
        """The job as JSON."""
        tables = FORMATS[self._format](self._root, None)
        extra = {"byte_tokens": True, "num_characters": self._num_characters, "max_in_flight": 256}
        staging = f"{self._root}/lake/staging"
        fields = {
            "spec_version": 1,
            "name": "job",
            "input": {"uri": tables.address("documents"), "key": "row_key"},
            "prompt": {"template": "{document}\n\n{query}"},
            "model": {"path": "no-model"},
            "sampling": {"max_tokens": 128},
            "output": {"uri": tables.address("out"), "staging_uri": staging},
            "engine": {"backend": "fake", "extra_args": extra},
        }
        return json.dumps(fields)

    def prepare(self, num_rows: int, seed: int) -> dict[str, dict[str, Any]]:
        """Everything until the commit."""
        self.step("input", str(num_rows), str(seed))
        result = self._root / "plan.json"
        args = ["--job-json", self.spec(), "--ds", DS, "--result", str(result)]
        found = {"plan": self.step("plan", *args)}
        self.plan_uri = json.loads(result.read_text())["plan_uri"]
        found["run"] = self.step("run", "--plan", self.plan_uri)
        return found

    def commit(self) -> dict[str, Any]:
        return self.step("commit", "--plan", self.plan_uri)

    def remember(self) -> None:
        """Keep what there is, for `restore`."""
        shutil.copytree(self._root, self._saved)

    def restore(self) -> None:
        """Put back what there was, on the disk and not only in its cache."""
        shutil.rmtree(self._root)
        shutil.copytree(self._saved, self._root)
        os.sync()

    @property
    def _saved(self) -> Path:
        return self._root.with_name(f"{self._root.name}-saved")


def measure(
    root: Path, table_format: str, num_rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one table."""
    job = Job(root, table_format, args)
    stages = job.prepare(num_rows, args.seed)
    job.remember()
    commits, writes = [], []
    for repetition in range(args.repetitions):
        if repetition:
            job.restore()
        commits.append(job.commit())
        if not repetition:
            job.step("check", str(num_rows), str(args.characters))
        os.sync()
        writes.append(job.step("write")["write_s"])
    stages["commit"] = {
        "wall_s": statistics.median(each["wall_s"] for each in commits),
        "peak_bytes": max(each["peak_bytes"] for each in commits),
    }
    pairs = list(zip(commits, writes, strict=True))
    ratios = {
        name: statistics.median(commit["wall_s"] / write[name] for commit, write in pairs)
        for name in writes[0]
    }
    return {
        "format": table_format,
        "num_rows": num_rows,
        "peak_bytes": {name: stages[name]["peak_bytes"] for name in _STAGES},
        "wall_s": {name: round(stages[name]["wall_s"], 2) for name in _STAGES},
        "commit_s": [round(each["wall_s"], 2) for each in commits],
        "write_s": {name: [round(each[name], 2) for each in writes] for name in writes[0]},
        "commit_ratio": round(ratios["zstd"], 2),
        "commit_ratio_vs_snappy": round(ratios["snappy"], 2),
    }


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By format and stage: peak memory of the largest table over that of the smallest."""
    found = {}
    for table_format in {row["format"]: None for row in rows}:
        chosen = [row for row in rows if row["format"] == table_format]
        chosen.sort(key=lambda row: row["num_rows"])
        least, most = chosen[0]["peak_bytes"], chosen[-1]["peak_bytes"]
        found[table_format] = {name: round(most[name] / least[name], 2) for name in _STAGES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="100000,1000000", help="of each table, by commas")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas")
    parser.add_argument("--characters", type=int, default=500, help="of each output")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of commit and write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="folder on the disk to measure")
    args = parser.parse_args()
    started_at = time.monotonic()
    rows = []
    sizes = sorted(map(int, args.rows.split(",")))
    most = sizes[-1]
    for table_format in args.formats.split(","):
        for num_rows in sizes:
            with tempfile.TemporaryDirectory(prefix="batchllm-lake-", dir=args.root) as folder:
                rows.append(measure(Path(folder, "job"), table_format, num_rows, args))
            print(json.dumps(rows[-1]), file=sys.stderr)
    result = {
        "benchmark": "lake",
        "characters": args.characters,
        "repetitions": args.repetitions,
        "seed": args.seed,
        "rows": rows,
        "growth": growth(rows),
        "peak_gib": {
            name: round(max(row["peak_bytes"][name] for row in rows) / _GIB, 2) for name in _STAGES
        },
        "commit_ratio": {r["format"]: r["commit_ratio"] for r in rows if r["num_rows"] == most},
        **provenance(),
        "wall_s": round(time.monotonic() - started_at, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
