"""A standalone Spark cluster on loopback: a master, and workers of one core each."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

EXECUTOR_MEMORY: Final = "768m"
"""Heap of a JVM: it sorts a range of 128 MiB without spilling."""
CONF: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executor.cores": "1",
    "spark.executor.memory": EXECUTOR_MEMORY,
    # One core for each. C2 would still compile at these sizes, which is no cost of rows.
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}
"""Settings of a session on a cluster."""
_START_S: Final = 60.0
_POLL_S: Final = 0.5
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Usage:
    """What the executors have taken."""

    jvm_s: float = 0.0
    """CPU seconds."""
    python_s: float = 0.0
    peak_bytes: int = 0
    """Largest memory of one executor, its JVM and its Python together."""
    peak_python_bytes: int = 0


@dataclass(slots=True)
class Cluster:
    """A running cluster: its address, and the processes of its workers."""

    master: str
    workers: list[subprocess.Popen[bytes]]
    usage: Usage = field(default_factory=Usage)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Updates `usage` meanwhile; executors that still run at the end count in full."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(_POLL_S):
                self.look()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
            self.look()
        finally:
            stop.set()
            watcher.join()

    def look(self) -> None:
        jvm_s = python_s = 0.0
        for worker in self.workers:
            held = held_by_python = 0
            for pid in descendants(worker.pid):
                seconds, num_bytes, is_python = _looked_up(pid)
                held += num_bytes
                if is_python:
                    python_s += seconds
                    held_by_python += num_bytes
                else:
                    jvm_s += seconds
            self.usage.peak_bytes = max(self.usage.peak_bytes, held)
            self.usage.peak_python_bytes = max(self.usage.peak_python_bytes, held_by_python)
        self.usage.jvm_s = max(self.usage.jvm_s, jvm_s)
        self.usage.python_s = max(self.usage.python_s, python_s)


@contextmanager
def spark_cluster(
    folder: Path, hosts: Sequence[str] = ("127.0.0.1",) * 2, memory: str = "1g"
) -> Iterator[Cluster]:
    """Start a cluster whose files lie in `folder`, and stop it at the end.

    Args:
        folder: new; local files of executors will be in `local`.
        hosts: loopback addresses, a worker on each. Executors of one host read each other's files.
        memory: of each worker.
    """
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYSPARK_PYTHON": sys.executable,
        **dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false -Dspark.ui.enabled=false",
    }
    (folder / "local").mkdir(parents=True)

    def start(name: str, host: str, *arguments: str) -> subprocess.Popen[bytes]:
        deploy = f"org.apache.spark.deploy.{name.partition('-')[0]}"
        command = [str(home / "bin" / "spark-class"), deploy, "--host", host, *arguments]
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, process_group=0
            )

    processes = [start("master.Master", "127.0.0.1", "--port", "0", "--webui-port", "0")]
    try:
        with (folder / "master.Master.log").open() as log:
            master = _found(log, r"Starting Spark master at (spark://\S+)")
        for number, host in enumerate(hosts):
            work = str(folder / f"work-{number}")
            sizes = ("--cores", "1", "--memory", memory, "--work-dir", work)
            name = f"worker.Worker-{number}"
            processes.append(start(name, host, *sizes, "--webui-port", "0", master))
        with (folder / "master.Master.log").open() as log:
            for _ in hosts:
                _found(log, r"(Registering worker)")
        yield Cluster(master, processes[1:])
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait()


def _found(log: IO[str], pattern: str) -> str:
    """The first group of the next line that matches, as soon as it is written."""
    ends_at, line = time.monotonic() + _START_S, ""
    while time.monotonic() < ends_at:
        line += log.readline()
        if line.endswith("\n"):
            if found := re.search(pattern, line):
                return found[1]
            line = ""
        else:
            time.sleep(0.1)
    sys.exit(f"Spark didn't start: no line has {pattern!r}")


def descendants(pid: int) -> Iterator[int]:
    """Numbers of all processes that descend from one."""
    children: list[str] = []
    with suppress(OSError):  # it has ended, or a thread has; each thread may start processes
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += (task / "children").read_text().split()
    for child in sorted(set(map(int, children))):
        yield child
        yield from descendants(child)


def _looked_up(pid: int) -> tuple[float, int, bool]:
    """CPU seconds with those of children that have ended, bytes of memory, whether it is Python.

    Of pages that processes share, such as forked ones, each one's part counts.
    """
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0, 0, False
    seconds = sum(map(int, fields.split()[11:15])) / _TICKS
    held = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return seconds, held, "java" not in name
