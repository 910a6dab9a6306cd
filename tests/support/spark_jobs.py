"""Plans of a small table by drivers in processes of their own, on a standalone cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from support.benchmark_modules import load
from support.fake_job import DS, job_fields

from batchllm_operator.errors import ERROR_MARK
from batchllm_operator.spark.plan_job import PHASES
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_DRIVER: Final = """
import sys
from batchllm_operator import cli, progress
from batchllm_operator.spark import ranges, reading

progress.LINE_INTERVAL_S = 0  # a line for each phase
ranges.RANGE_BYTES, reading.PART_BYTES = 12_000, 500
sys.exit(cli.main(["plan", "--ds", sys.argv[1], "--job-json", sys.argv[2], "--on", "spark"]))
"""
"""Plans a small table in many parts and ranges."""
_PATIENCE_S: Final = 240.0
_QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_CONF: Final = {
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": _QUICK_JAVA,
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": _QUICK_JAVA,
    "spark.shuffle.io.retryWait": "200ms",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@dataclass(slots=True)
class Driver:
    """A driver's process. Its lines on stderr are read as they are written."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))

    @property
    def num_phases(self) -> int:
        """Phases of the plan that have begun."""
        return sum(any(f", {phase}" in line for line in self.lines) for phase in PHASES)

    def wait(self) -> int:
        code = self.process.wait(_PATIENCE_S)
        self.reader.join()
        return code

    @property
    def text(self) -> str:
        """All that it has said."""
        return "\n".join(self.lines)

    @property
    def error(self) -> str:
        """What the user is told: the last line, and no other."""
        (error,) = (line for line in self.lines if line.startswith(ERROR_MARK))
        assert self.lines[-1] == error
        assert not any(line.startswith("Traceback") for line in self.lines), self.text
        return error


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs of a cluster over tables of a lake."""

    cluster: Any
    folder: Path
    """The cluster's."""
    lake: Path
    drivers: list[Driver] = field(default_factory=list)

    @contextmanager
    def ended(self) -> Iterator[Jobs]:
        """Itself; drivers that a failed test has left are killed at the end."""
        try:
            yield self
        finally:
            for driver in self.drivers:
                driver.process.kill()
                driver.wait()

    def spec(self, name: str, conf: Mapping[str, str] | None = None, **changes: Any) -> str:
        settings = _CONF | {"spark.master": self.cluster.master} | dict(conf or {})
        planner = {"num_shards": None, "spark": {"conf": settings}}
        output = {"uri": f"{self.lake}/{name}/out"} | changes.pop("output", {})
        fields = job_fields(str(self.lake), name=name, planner=planner, output=output, **changes)
        return json.dumps(fields)

    def start(self, spec: str) -> Driver:
        """A driver that plans a job, with a working folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="driver-", dir=self.lake))
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _DRIVER, DS, spec],
            cwd=folder,
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.drivers.append(Driver(process, folder))
        return self.drivers[-1]

    def folders(self, name: str) -> list[Path]:
        """Folders beside the job's plans, and these; empty ones count."""
        return sorted((self.lake / name / "out" / "_batchllm" / name / DS).glob("*"))

    def plan(self, name: str) -> StoredPlan:
        """The only plan of a job, beside which nothing is left."""
        (folder,) = self.folders(name)
        return StoredPlan.open(str(folder))

    def descendants(self, pid: int) -> list[int]:
        """All processes that descend from one."""
        return list(load("spark_cluster").descendants(pid))

    def executors(self) -> dict[str, int]:
        """Processes of executors by the names of their local folders."""
        found = {}
        for worker in self.cluster.workers:
            for pid in self.descendants(worker.pid):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_text()
                    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
                except OSError:
                    continue
                if "CoarseGrainedExecutorBackend" in command:
                    given = dict(each.partition("=")[::2] for each in environment)
                    found[Path(given["SPARK_EXECUTOR_DIRS"]).name] = pid
        return found

    def shuffled(self) -> dict[int, Path]:
        """By the number of a shuffle: the local folder of an executor that has files of it."""
        found: dict[int, Path] = {}
        with suppress(FileNotFoundError):  # an executor that ends takes its folders away
            for file in self.folder.glob("local/spark-*/executor-*/blockmgr-*/*/shuffle_*.data"):
                found[int(file.name.split("_")[1])] = file.parents[2]
        return found

    def kill(self, folder: Path) -> None:
        """End the executor of a local folder at once, and take its files away."""
        os.kill(self.executors()[folder.name], signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(driver: Driver | None, look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it does."""
    ends_at = time.monotonic() + _PATIENCE_S
    while not (found := look()):
        assert driver is None or driver.process.poll() is None, driver.lines
        assert time.monotonic() < ends_at, "it never happens"
        time.sleep(0.005)
    return found


def rows_of_shards(plan: StoredPlan) -> list[list[int]]:
    found = []
    for shard_idx in range(len(plan.manifest.shards)):
        with plan.open_shard(shard_idx) as shard:
            requests = shard.read(["row_idxs"])["row_idxs"].to_pylist()
            found.append([*chain.from_iterable(requests)])
    return found


def planned_rows(plan: StoredPlan) -> Counter[int]:
    return Counter(chain.from_iterable(rows_of_shards(plan)))
