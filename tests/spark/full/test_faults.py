"""Plans on a standalone cluster whose parts die, or can't do what they should."""

import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.benchmark_modules import load
from support.fake_job import DS, document_rows
from support.spark_jobs import Driver, Jobs, planned_rows, wait_for

from batchllm_operator import __version__
from batchllm_operator.errors import ERROR_MARK, ExitCode
from batchllm_operator.stored_plan.stored_plan import StoredPlan

NUM_ROWS = 300
HOSTS = ("127.0.0.1", "127.0.0.2")  # neither a file nor a task of one serves the other


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """A cluster, and a table of two files with many row groups each."""
    lake = tmp_path_factory.mktemp("lake")
    folder = lake / "documents" / f"ds={DS}"
    folder.mkdir(parents=True)
    rows = document_rows(15, 20)
    for name, some in (("a", rows[:160]), ("b", rows[160:])):
        pq.write_table(pa.Table.from_pylist(some), folder / f"{name}.parquet", row_group_size=10)
    cluster_folder = tmp_path_factory.mktemp("spark") / "cluster"
    with (
        load("spark_cluster").spark_cluster(cluster_folder, HOSTS) as cluster,
        Jobs(cluster, cluster_folder, lake).ended() as jobs,
    ):
        yield jobs


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> StoredPlan:
    driver = jobs.start(jobs.spec("undisturbed"))
    assert driver.wait() == 0, driver.lines
    return jobs.plan("undisturbed")


def check_same(plan: StoredPlan, undisturbed: StoredPlan) -> None:
    """All files are the same, and have each row once."""
    assert plan.manifest.files == undisturbed.manifest.files
    assert {name: plan.folder.sha256(name) for name in plan.manifest.files} == {
        name: file.sha256 for name, file in undisturbed.manifest.files.items()
    }
    assert planned_rows(plan) == Counter(range(NUM_ROWS))
    assert len(plan.manifest.shards) > 10


def logged(jobs: Jobs, name: str) -> dict[str, str]:
    """Settings with which Spark writes down what happens."""
    folder = jobs.lake / "events" / name
    folder.mkdir(parents=True)
    return {"spark.eventLog.enabled": "true", "spark.eventLog.dir": str(folder)}


def events(jobs: Jobs, name: str) -> list[dict[str, Any]]:
    (log,) = (jobs.lake / "events" / name).iterdir()
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_executors_killed_in_each_phase(jobs: Jobs, undisturbed: StoredPlan) -> None:
    wait_for(None, lambda: not jobs.executors() and not jobs.shuffled())  # of earlier drivers
    driver = jobs.start(jobs.spec("killed", logged(jobs, "killed")))
    killed_in = []
    for phase, num_shuffles in enumerate((2, 1, 2, 1), start=1):

        def has_begun(phase: int = phase) -> bool:
            return driver.num_phases >= phase

        wait_for(driver, has_begun)
        before = set(jobs.shuffled())

        def written(before: set[int] = before, wanted: int = num_shuffles) -> Path | None:
            """The folder of who has written files of the phase's last shuffle."""
            found = {number: at for number, at in jobs.shuffled().items() if number not in before}
            return found[max(found)] if len(found) >= wanted else None

        jobs.kill(wait_for(driver, written))
        killed_in.append(driver.num_phases)
    assert driver.wait() == 0, driver.lines
    assert killed_in == [1, 2, 3, 4]
    kinds = Counter(event["Event"] for event in events(jobs, "killed"))
    assert kinds["SparkListenerExecutorRemoved"] >= 4
    check_same(jobs.plan("killed"), undisturbed)


def test_tasks_that_run_twice(jobs: Jobs, undisturbed: StoredPlan) -> None:
    eager = {"": "true", ".multiplier": "1.01", ".quantile": "0.1", ".interval": "10ms"}
    eager |= {".minTaskRuntime": "1ms"}
    conf = logged(jobs, "twice") | {
        f"spark.speculation{name}": value for name, value in eager.items()
    }
    driver = jobs.start(jobs.spec("twice", conf))
    assert driver.wait() == 0, driver.lines
    infos = [each["Task Info"] for each in events(jobs, "twice") if "Task Info" in each]
    assert any(info["Speculative"] for info in infos)
    check_same(jobs.plan("twice"), undisturbed)


def has_staged(jobs: Jobs, name: str) -> bool:
    """Whether tasks have written the plan's rows."""
    return any(list(folder.glob("rows-*")) for folder in jobs.folders(name))


def test_a_driver_that_is_killed(jobs: Jobs, undisturbed: StoredPlan) -> None:
    """It publishes nothing; what it leaves is garbage; it can be started again."""
    spec = jobs.spec("driver")
    driver = jobs.start(spec)
    wait_for(driver, lambda: has_staged(jobs, "driver"))
    driver.process.kill()
    assert driver.wait() == -signal.SIGKILL
    wait_for(None, lambda: not jobs.executors())
    (staged,) = jobs.folders("driver")
    assert staged.name.startswith("staged-")
    assert gc(spec, "1d") == "no file is both old enough and no longer needed\n"
    assert staged.exists()
    gc(spec, "0s")
    assert jobs.folders("driver") == []
    assert jobs.start(spec).wait() == 0
    check_same(jobs.plan("driver"), undisturbed)


def java_of(jobs: Jobs, driver: Driver) -> list[int]:
    """The driver's Java process, from when a shell prepares it."""
    found = []
    for pid in jobs.descendants(driver.process.pid):
        with suppress(OSError):  # it has ended
            if "SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "writing"])
def test_a_driver_that_is_stopped(jobs: Jobs, number: signal.Signals, when: str) -> None:
    """It stops its tasks and its Java, and leaves nothing."""
    name = f"stopped-{when}-{number.name.lower()}"
    driver = jobs.start(jobs.spec(name))
    java = wait_for(driver, lambda: java_of(jobs, driver))
    if when == "writing":
        wait_for(driver, lambda: has_staged(jobs, name))
    driver.process.send_signal(number)
    assert driver.wait() == 128 + number
    assert driver.lines[-1].startswith("batchllm: ")
    assert not any(line.startswith("Traceback") for line in driver.lines), driver.text
    wait_for(None, lambda: not jobs.executors())
    wait_for(None, lambda: not any(Path(f"/proc/{pid}").exists() for pid in java))
    assert jobs.folders(name) == []


def test_a_driver_whose_java_is_killed(jobs: Jobs) -> None:
    driver = jobs.start(jobs.spec("java"))
    wait_for(driver, lambda: has_staged(jobs, "java"))
    for pid in java_of(jobs, driver):
        os.kill(pid, signal.SIGKILL)
    assert driver.wait() == ExitCode.FAILURE
    # Above it, a thread of pyspark's says that it has lost its connection.
    error = "Spark's job failed: the driver's Java process has ended"
    assert driver.lines[-1].startswith(f"{ERROR_MARK}{error}")
    wait_for(None, lambda: not jobs.executors())


def gc(spec: str, age: str) -> str:
    command = ["-m", "batchllm_operator", "gc", "--job-json", spec, "--older-than", age]
    done = subprocess.run(
        [sys.executable, "-P", *command, "--yes"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_executors_without_the_package(jobs: Jobs, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    driver = jobs.start(jobs.spec("lacking", {"spark.pyspark.python": str(python)}))
    assert driver.wait() == ExitCode.INVALID
    assert f"Spark's executors lack batchllm_operator {__version__}" in driver.error
    assert f"ModuleNotFoundError: No module named 'batchllm_operator' ({python})" in driver.error
    assert jobs.folders("lacking") == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("stdout", r"Spark's executors can't write the plan: /proc/self/cwd/stdout/.*: \[Errno"),
        ("staging", r"/proc/self/cwd/staging/.*: the driver doesn't see what Spark's executors w"),
    ],
)
def test_staging_that_isnt_shared(jobs: Jobs, name: str, fault: str) -> None:
    """A working folder of a process: in those of executors, `stdout` is a file."""
    uri = f"/proc/self/cwd/{name}"
    driver = jobs.start(jobs.spec(name, output={"staging_uri": uri}))
    assert driver.wait() == ExitCode.FAILURE
    assert re.match(ERROR_MARK + fault, driver.error)
    assert not [path for path in driver.folder.rglob("*") if path.is_file()]
    assert jobs.folders(name) == []
