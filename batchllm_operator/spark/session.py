"""The Spark session of a job: the one that is there, or a new one."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator import __version__
from batchllm_operator.errors import BatchLLMError, MissingLibraryError, SpecError
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LEAST_JAVA: Final = 17
_NEEDED: Final = {
    # Coalescing or splitting partitions would tear the ranges of a plan apart.
    "spark.sql.adaptive.enabled": "false",
    # Batches, not rows, bound what Python holds.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "512",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),
}
_LAKE: Final = ("AWS_", "PYICEBERG_")
"""Beginnings of the names of variables with addresses and credentials of storage and catalogs."""
_log = logging.getLogger(__name__)

Rows = Iterable[Any]
"""`pyarrow.RecordBatch`es of a task."""
Task = Callable[[Rows], Iterator[Any]]


class SparkJobError(BatchLLMError):
    """Spark gave up on a job: tasks failed again and again, or it can't be reached."""


@contextmanager
def spark_session(spec: JobSpec) -> Iterator[SparkSession]:
    """The active session, or one made from `planner.spark.conf`, which ends with the context.

    Tasks see this process's variables for the lake, unless the session has some of its own (on
    Spark Connect they see only their own). Settings that jobs need are as before afterwards.

    Raises:
        MissingLibraryError: pyspark or pandas isn't installed.
        SpecError: there is no Java that Spark runs on, or executors lack this package, or have
            another release of it.
        SparkJobError: the cluster can't be reached.
    """
    spark, is_new = _open(spec)
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in _NEEDED}
    given = _given_to_tasks(spark)
    try:
        for name, value in _NEEDED.items():
            spark.conf.set(name, value)
        _check_executors(spark)
        yield spark
    finally:
        with suppress(Exception):  # the error that led here says more
            if is_new:
                spark.stop()
            else:
                for name in given:
                    del spark.sparkContext.environment[name]
                for name, was in before.items():
                    if was is not None:
                        spark.conf.set(name, was)


def tasks(spark: SparkSession, payloads: Sequence[bytes]) -> DataFrame:
    """A task for each payload: a data frame with one row per partition, its column `payload`."""
    from pyspark.sql.functions import col

    rows = [(idx, bytearray(payload)) for idx, payload in enumerate(payloads)]
    frame = spark.createDataFrame(rows, "task int, payload binary")
    return frame.repartitionById(max(1, len(rows)), col("task")).select("payload")


def payloads_in(batches: Rows) -> Iterator[bytes]:
    """In a task: the payloads that it is given."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


def said(values: Sequence[bytes]) -> Any:
    """In a task: values for `collect`, as a `pyarrow.RecordBatch`."""
    import pyarrow as pa

    return pa.record_batch({"said": pa.array(values, pa.binary())})


def collect(frame: DataFrame) -> list[bytes]:
    """The values of a data frame's one binary column.

    Raises:
        SparkJobError: the job failed; its message is the last line of what a task said.
    """
    try:
        return [bytes(row[0]) for row in frame.collect()]
    # pyspark's own errors have no common base below Exception: Py4J's, its own, gRPC's.
    except Exception as error:
        raise SparkJobError(f"Spark's job failed: {_reason(error)}") from error


def _open(spec: JobSpec) -> tuple[SparkSession, bool]:
    """The session, and whether it is a new one."""
    try:
        import pandas  # noqa: F401 - pyspark needs it, and says so late
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, "planner.engine: spark") from error
    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what it logs, it raises, too
    conf = spec.planner.spark.conf
    if "spark.remote" not in conf and "SPARK_REMOTE" not in os.environ:
        _check_java()
    # pyspark itself reads this setting only in spark-submit.
    if (python := conf.get("spark.pyspark.python")) is not None:
        os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"batchllm {spec.name}")
    for name, value in conf.items():
        builder = builder.config(name, value)
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        return builder.getOrCreate(), True
    except Exception as error:  # as in `collect`
        raise SparkJobError(f"Spark can't start: {_reason(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            # pyspark has put its own there.
            signal.signal(signal.SIGINT, on_interrupt or signal.SIG_DFL)


def _given_to_tasks(spark: SparkSession) -> list[str]:
    """Add variables to the environment of the session's tasks; returns their names."""
    try:
        environment = spark.sparkContext.environment
    # Spark Connect has no context, and says so by an error of its own.
    except Exception:  # noqa: BLE001
        return []
    names = [name for name in os.environ if name.startswith(_LAKE) and name not in environment]
    environment.update({name: os.environ[name] for name in names})
    return names


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    needs = f"Spark runs on Java {_LEAST_JAVA} or later"
    where = f"JAVA_HOME is {home!r}" if home else "PATH has no java"
    if shutil.which(java) is None:
        raise SpecError(
            f"planner.engine: {needs}, and there is none ({where}); install one, such as Debian's"
            " openjdk-17-jre-headless"
        )
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?([0-9]+)', said)
    if found is None or int(found[1]) < _LEAST_JAVA:
        lines = said.strip().splitlines()
        raise SpecError(f"planner.engine: {needs}, not on {java}: {next(iter(lines), 'it fails')}")


def _check_executors(spark: SparkSession) -> None:
    """Refuse executors that lack this package, or have another release of it."""
    from pyspark.errors import PythonException
    from pyspark.sql.functions import col, udf

    def probe(_: bytes) -> str:  # sent whole, as all nested functions are
        import importlib
        import sys

        try:
            version = str(importlib.import_module("batchllm_operator").__version__)
            for name in ("pandas", "pyarrow"):
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver says it
            return f"{type(error).__name__}: {error} ({sys.executable})"
        return version

    # Not `mapInArrow`: without pyarrow it fails before it calls the function.
    ask = udf(probe, "string", useArrow=False)
    try:
        (row,) = tasks(spark, [b""]).select(ask(col("payload"))).collect()
        found = str(row[0])
    except PythonException as error:  # such as another release of Python
        found = _reason(error)
    except Exception as error:  # as in `collect`
        raise SparkJobError(f"Spark's executors can't run Python: {_reason(error)}") from error
    if found != __version__:
        raise SpecError(
            f"planner.engine: Spark's executors have not batchllm_operator {__version__}, which the"
            f" driver is, but: {found}; use one image for both, or a packed environment"
            " (spark.archives)"
        )


def _reason(error: Exception) -> str:
    """The line of an error that says what happened: the last of a task's traceback, or the first.

    Texts of Java's errors go on with stack traces.
    """
    from py4j.protocol import Py4JNetworkError

    if isinstance(error, (ConnectionError, Py4JNetworkError)):
        return f"the driver's Java process has ended ({error})"
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    said = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt)\b", line)]
    found = said[-1:] or [line for line in lines if line][:1] or [type(error).__name__]
    return found[0][:500]
