"""A lake with one job in it, and the job's commands."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from batchllm_operator.errors import FINAL_EXIT_CODES, ExitCode
from benchmarks.faults.job import Job, Truth, computed_truth, input_rows, is_whole, job_json
from benchmarks.faults.tables import BUCKET, DS, FORMATS, s3_client
from benchmarks.faults.zygote import Child, Command

MOST_TRIES: Final = 12
_MOST_S: Final = 120.0  # for one command


class StuckError(Exception):
    """A job doesn't come to its end, though nothing fails any more."""


class Place:
    """Tables of one format, and a staging folder, in a folder or bucket of their own."""

    def __init__(
        self, root: Path, table_format: str, job: Job, endpoints: tuple[str, str] | None
    ) -> None:
        """`endpoints` are S3's: the commands', and the one that never fails, for looking on."""
        self.root, self.job = root, job
        self.endpoint: str | None
        self.endpoint, direct = endpoints or (None, None)
        self.pace = 30.0 if endpoints is None else 10.0  # moto's server answers slowly
        """How many times as fast as usual workers take over lost shards."""
        (root / "tmp").mkdir(parents=True)
        self.fs: pafs.FileSystem = s3_client(direct) if direct else pafs.LocalFileSystem()
        if direct:
            self.fs.create_dir(BUCKET)
        base = f"{BUCKET}/{root.name}" if direct else f"{root}/lake"
        self.staging_path = f"{base}/staging"
        self.tables: Any = FORMATS[table_format](root, direct)
        scheme = "s3://" if direct else ""
        self.spec = job_json(job, self.tables, scheme + self.staging_path)
        self.num_versions = 0
        """Of the input that there have been."""
        self.published: int | None = None
        """Version of the input that the output table answers; None if it hasn't been written."""
        # Beside the folder, which may be a disk that is full.
        self._logs = root.with_name(f"{root.name}-logs")
        self._logs.mkdir(exist_ok=True)
        self.log = self._logs / "log"
        self.engine_log = self._logs / "engine.log"

    def new_input(self, version: int) -> None:
        """Change the job's input, and forget what the engine has done."""
        self.num_versions = max(self.num_versions, version + 1)
        self.tables.replace_input(input_rows(version))
        self.engine_log.unlink(missing_ok=True)

    def start(self, *args: object, **faults: Any) -> Child:
        """Start a command."""
        with self.log.open("a") as log:
            log.write(f"$ {[str(arg)[:60] for arg in args]} {faults}\n")
        settings = {"endpoint": self.endpoint, "pace": self.pace, **faults}
        return Child(
            Command(list(map(str, args)), self.log, self.engine_log, self.root, **settings)
        )

    def step_through(self, args: Sequence[str], look: Callable[[], object]) -> int:
        """Give a command, and look before each of its file operations; how many there were."""
        steps, writes = self.root / "steps", Path(f"{self.engine_log}.writes")
        writes.unlink(missing_ok=True)
        os.mkfifo(steps)
        pipe = os.open(steps, os.O_RDWR)
        child = self.start(*args, steps=steps)
        num_steps = 0
        started_at = time.monotonic()
        while child.wait(0.002) is None and time.monotonic() - started_at < _MOST_S:
            count = int(writes.read_text() or 0) if writes.exists() else 0
            if count > num_steps:
                look()
                os.write(pipe, b"." * (count - num_steps))
                num_steps = count
        self.end(child)
        os.close(pipe)
        steps.unlink()
        return num_steps

    def plan_args(self) -> list[str]:
        result = str(self.root / "plan.json")
        return ["plan", "--job-json", self.spec, "--ds", DS, "--result", result]

    def plan_uri(self) -> str:
        """What the last `plan` made."""
        found = json.loads((self.root / "plan.json").read_text())
        return str(found["plan_uri"])

    def stages(self, plan_uri: str) -> dict[str, list[str]]:
        """Arguments of what comes after `plan`, in order."""
        # The next try of an owner takes over at once.
        run = ["run", "--plan", plan_uri, "--owner", "job"]
        return {"run": run, "commit": ["commit", "--plan", plan_uri]}

    def end(self, child: Child) -> int:
        """Wait for a command."""
        code = child.wait(_MOST_S)
        if code is None:
            child.kill()
            raise StuckError(f"a command hung for {_MOST_S:.0f} s: see {self.log}")
        with self.log.open("a") as log:
            log.write(f"= {code}\n")
        return code

    def finish(self, args: Sequence[str]) -> None:
        """Give a command again and again until it ends well."""
        for attempt in range(MOST_TRIES):
            code = self.end(self.start(*args))
            if code == ExitCode.OK:
                return
            if code == ExitCode.INCOMPLETE and args[0] == "commit":
                self.finish(self.stages(args[2])["run"])
            elif code in FINAL_EXIT_CODES:
                raise StuckError(f"{args[0]} ended with {code}, which is final: see {self.log}")
            time.sleep(0.05 * attempt)
        raise StuckError(f"{args[0]} failed {MOST_TRIES} times: see {self.log}")

    def do_all(self) -> None:
        """All stages of the job."""
        self.finish(self.plan_args())
        for args in self.stages(self.plan_uri()).values():
            self.finish(args)

    def requests(self, plan_uri: str) -> dict[int, list[int]]:
        """The requests of each shard."""
        found = {}
        for info in self.fs.get_file_info(pafs.FileSelector(plan_uri.removeprefix("s3://"))):
            if info.base_name.startswith("shard-"):
                shard = int(info.base_name.removeprefix("shard-").removesuffix(".parquet"))
                table = pq.read_table(self.fs.open_input_file(info.path), columns=["request_idx"])
                found[shard] = table["request_idx"].to_pylist()
        return found

    def remove(self) -> None:
        """Take it away."""
        for folder in (self.root, self._logs):
            shutil.rmtree(folder, ignore_errors=True)


def _is_locked(error: Exception) -> bool:
    """Whether the catalog's database was locked, as it is by a process that was stopped."""
    from sqlalchemy.exc import OperationalError

    return isinstance(error, OperationalError)


class Onlooker:
    """Another program that reads the output table all the time while something is published.

    On disk a read that fails is half a commit, too: what is published there is replaced in one
    step. On S3 a reader may mix two versions of a file, which it notices.
    """

    def __init__(self, place: Place, allowed: Sequence[int | None]) -> None:
        """`allowed` are versions of the input; None is a table that hasn't been written."""
        self._place = place
        self._allowed: list[Truth | None] = [
            None if version is None else computed_truth(version) for version in allowed
        ]
        self.num_reads = self.num_halves = self.num_errors = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Read once."""
        try:
            rows: list[Mapping[str, Any]] = self._place.tables.output().to_pylist()
        except Exception as error:  # noqa: BLE001 - each library has its own
            self.num_errors += 1
            self.num_halves += self._place.endpoint is None and not _is_locked(error)
            with self._place.log.open("a") as log:
                log.write(f"reader: {type(error).__name__}: {error}\n")
            return
        self.num_reads += 1
        if not any(is_whole(rows, truth) for truth in self._allowed):
            self.num_halves += 1
            with self._place.log.open("a") as log:
                log.write(f"HALF: {len(rows)} rows\n")

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.look()
