"""Plans on a standalone cluster whose parts die, or can't do what they should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.benchmark_modules import load
from support.fake_job import DS, document_rows
from support.spark_jobs import Jobs, planned_rows, wait_for

from batchllm_operator import __version__
from batchllm_operator.artifacts.stored_plan import StoredPlan
from batchllm_operator.errors import ERROR_MARK, ExitCode

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
    with load("spark_cluster").spark_cluster(cluster_folder, HOSTS) as cluster:
        yield Jobs(cluster, cluster_folder, lake)


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


def test_executors_killed_in_each_phase(jobs: Jobs, undisturbed: StoredPlan) -> None:
    driver = jobs.start(jobs.spec("killed"))
    killed_in = []
    for phase, num_shuffles in enumerate((2, 1, 2, 1), start=1):
        wait_for(driver, lambda phase=phase: driver.num_phases >= phase)
        before = set(jobs.shuffled())

        def written(before: set[int] = before, wanted: int = num_shuffles) -> Path | None:
            """The folder of who has written files of the phase's last shuffle."""
            found = {number: at for number, at in jobs.shuffled().items() if number not in before}
            return found[max(found)] if len(found) >= wanted else None

        jobs.kill(wait_for(driver, written))
        killed_in.append(driver.num_phases)
    assert driver.wait() == 0, driver.lines
    assert killed_in == [1, 2, 3, 4]
    kinds = Counter(event["Event"] for event in driver.events)
    assert kinds["SparkListenerExecutorRemoved"] >= 4
    check_same(jobs.plan("killed"), undisturbed)


def test_tasks_that_run_twice(jobs: Jobs, undisturbed: StoredPlan) -> None:
    eager = {"": "true", ".multiplier": "1.01", ".quantile": "0.1", ".interval": "10ms"}
    eager |= {".minTaskRuntime": "1ms"}
    conf = {f"spark.speculation{name}": value for name, value in eager.items()}
    driver = jobs.start(jobs.spec("twice", conf))
    assert driver.wait() == 0, driver.lines
    infos = [each["Task Info"] for each in driver.events if "Task Info" in each]
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
    assert gc(spec, "1d") == "0 files, 0 bytes in all\n"
    assert staged.exists()
    gc(spec, "0s")
    assert jobs.folders("driver") == []
    assert jobs.start(spec).wait() == 0
    check_same(jobs.plan("driver"), undisturbed)


def gc(spec: Path, age: str) -> str:
    command = ["-m", "batchllm_operator.cli", "gc", "--job", str(spec), "--older-than", age]
    done = subprocess.run(
        [sys.executable, "-P", *command, "--yes"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_driver_that_is_interrupted(jobs: Jobs) -> None:
    driver = jobs.start(jobs.spec("interrupted"))
    wait_for(driver, lambda: has_staged(jobs, "interrupted"))
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait() == ExitCode.INTERRUPTED
    assert "batchllm: stopped by signal 2; " in driver.lines[-1]
    assert jobs.folders("interrupted") == []


def test_a_driver_that_loses_its_java(jobs: Jobs) -> None:
    driver = jobs.start(jobs.spec("java"))
    wait_for(driver, lambda: has_staged(jobs, "java"))
    for pid in jobs.descendants(driver.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert driver.wait() == ExitCode.FAILURE
    (error,) = driver.errors
    assert error == f"{ERROR_MARK}Spark's job failed: "


@pytest.mark.parametrize("is_there", [True, False])
def test_executors_without_the_package(jobs: Jobs, tmp_path: Path, is_there: bool) -> None:
    python = tmp_path / "bin" / "python"
    if is_there:
        venv.create(tmp_path, with_pip=False)
    driver = jobs.start(jobs.spec("lacking", {"spark.pyspark.python": str(python)}))
    code = driver.wait()
    (error,) = driver.errors
    assert error == driver.lines[-1]
    if is_there:
        assert code == ExitCode.INVALID
        assert f"Spark's executors have not batchllm_operator {__version__}" in error
        assert "No module named" in error
    else:
        assert code == ExitCode.FAILURE
        assert "Spark's executors can't run Python: " in error
        assert f'Cannot run program "{python}"' in error
    assert jobs.folders("lacking") == []


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        # In executors' working folders this is their log.
        ("stdout", r"Spark's executors can't write the plan: .*Not a directory"),
        (
            "staging",
            r"the driver doesn't see what Spark's executors write there; set .*staging_uri",
        ),
    ],
)
def test_a_folder_that_isnt_shared(jobs: Jobs, place: str, fault: str) -> None:
    """Each process has a working folder of its own."""
    name = f"apart-{place}"
    spec = jobs.spec(name, output={"staging_uri": f"/proc/self/cwd/{place}"})
    driver = jobs.start(spec)
    assert driver.wait() == ExitCode.FAILURE
    (error,) = driver.errors
    assert error == driver.lines[-1]
    assert re.search(fault, error)
    assert not (jobs.lake / name / place).exists()


@pytest.mark.parametrize("format", ["", "delta+"])
def test_many_small_files(jobs: Jobs, tmp_path: Path, format: str) -> None:
    """A task reads several."""
    rows = pa.Table.from_pylist(document_rows(150, 20))
    if format:
        import deltalake

        rows = rows.append_column("ds", pa.array([DS] * len(rows)))
        deltalake.write_deltalake(
            tmp_path / "many",
            rows,
            partition_by="ds",
            target_file_size=1,
        )
    else:
        folder = tmp_path / "many" / f"ds={DS}"
        folder.mkdir(parents=True)
        for number in range(len(rows)):
            pq.write_table(rows.slice(number, 1), folder / f"{number:04}.parquet")
    name = f"many-{format[:5]}"
    driver = jobs.start(jobs.spec(name, input={"uri": f"{format}{tmp_path}/many"}), is_cut=False)
    assert driver.wait() == 0, driver.lines
    plan = jobs.plan(name)
    assert planned_rows(plan) == Counter(range(3000))
    assert len(plan.manifest.input_files) == 3000
    assert 1 < len(plan.manifest.row_parts) < 100
