"""The Spark session of a job: the one that is there, or a new one."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchllm_operator import __version__
from batchllm_operator.errors import MissingLibraryError, SpecError
from batchllm_operator.spark.tasks import named_failures, reason_of
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LEAST_SPARK: Final = (4, 1)
_LEAST_JAVA: Final = 17
_NEEDED: Final = {
    # Coalescing or splitting partitions would tear the ranges of a plan apart.
    "spark.sql.adaptive.enabled": "false",
    # Batches, not rows, bound what Python holds.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "512",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),
    # By default only some functions have it, and Spark starts Python again for the others.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}
_LAKE: Final = ("AWS_", "AZURE_", "GOOGLE_", "PYICEBERG_")
"""Beginnings of the names of variables with addresses and credentials of storage and catalogs."""
_log = logging.getLogger(__name__)


@contextmanager
def spark_session(spec: JobSpec) -> Iterator[SparkSession]:
    """The active session, or one made from `planner.spark.conf`, which ends with the context.

    Tasks see this process's variables for the lake, unless the session has some of its own (on
    Spark Connect they see only their own). Afterwards no task of the context runs, and settings
    are as before.

    Raises:
        MissingLibraryError: pyspark or pandas isn't installed.
        SpecError: there is no Java, or it is too old, or Spark is; or executors lack this package,
            or have another release of it.
        SparkJobError: the cluster can't be reached.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_logs_of_py4j())
        spark, is_new = _open(spec)
        stack.enter_context(_ended(spark) if is_new else _as_before(spark))
        major, minor = spark.version.split(".")[:2]
        if (int(major), int(minor)) < _LEAST_SPARK:
            least = ".".join(map(str, _LEAST_SPARK))
            raise SpecError(
                f"planner.engine: needs Spark {least} or later, and the session has {spark.version}"
            )
        for name, value in _NEEDED.items():
            spark.conf.set(name, value)
        stack.enter_context(_given_to_tasks(spark))
        _check_executors(spark)
        yield spark


@contextmanager
def _without_logs_of_py4j() -> Iterator[None]:
    """Leaves out py4j's log records, also the root logger's: it raises the same."""
    named, root = logging.getLogger("py4j"), logging.getLogger()
    level = named.level

    def is_shown(record: logging.LogRecord) -> bool:
        return Path(record.pathname).parent.name != "py4j"

    named.setLevel(logging.CRITICAL)
    root.addFilter(is_shown)
    try:
        yield
    finally:
        root.removeFilter(is_shown)
        named.setLevel(level)


@contextmanager
def _ended(spark: SparkSession) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the error says more, as what Spark logs of its end
            spark.sparkContext.setLogLevel("OFF")
        raise
    finally:
        # A thread of pyspark's may print that Java has closed its connection.
        with suppress(Exception), redirect_stderr(StringIO()):
            spark.stop()


@contextmanager
def _as_before(spark: SparkSession) -> Iterator[None]:
    """Leaves a session without our jobs and settings."""
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in _NEEDED}
    tag = f"batchllm-{uuid.uuid4().hex}"
    spark.addTag(tag)
    try:
        yield
    finally:
        with suppress(Exception):  # as above
            spark.interruptTag(tag)
            spark.removeTag(tag)
            for name, was in before.items():
                if was is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, was)


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
    # Java that loses its driver while it starts never ends, so a stop waits for it. In a thread,
    # pyspark leaves the handler of SIGINT alone.
    made: list[tuple[SparkSession, bool]] = []
    with ThreadPoolExecutor(1, "batchllm-spark") as thread:
        thread.submit(int).result()  # a stop while it begins would lose the thread
        try:
            thread.submit(lambda: made.append(_start(spec))).result()
        except KeyboardInterrupt:
            _log.warning("stopping as soon as Spark has started")
            thread.shutdown()
            for spark, is_new in made:
                with _ended(spark) if is_new else nullcontext():
                    raise
            raise
    return made[0]


def _start(spec: JobSpec) -> tuple[SparkSession, bool]:
    """See `_open`."""
    from pyspark.sql import SparkSession

    conf = spec.planner.spark.conf
    is_remote = "spark.remote" in conf or "SPARK_REMOTE" in os.environ
    # pyspark itself reads this setting only in spark-submit.
    if (python := conf.get("spark.pyspark.python")) is not None:
        os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    where = conf.get("spark.remote") or conf.get("spark.master", "the default master")
    above = "" if is_remote else "; Java's lines above say more"
    if not is_remote and "PYSPARK_GATEWAY_PORT" not in os.environ:  # of spark-submit's Java
        _check_java()
    with named_failures(f"Spark can't start on {where}{above}"):
        builder = SparkSession.builder.appName(f"batchllm {spec.name}")
        if not is_remote:
            builder = builder.config("spark.ui.showConsoleProgress", "false")  # there is our own
        for name, value in conf.items():
            builder = builder.config(name, value)
        asked_at_ms = time.time() * 1000
        spark = builder.getOrCreate()
        # Another thread's session isn't active here.
        return spark, is_remote or int(spark.sparkContext.startTime) >= asked_at_ms


def _check_java() -> None:
    """Refuse a machine without Java that Spark can run on (`SpecError`)."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    has = f"there is no {java}"
    if shutil.which(java) is not None:
        asked = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
        version = re.search(r'version "(?:1\.)?([0-9]+)', asked.stderr)
        if version is not None and int(version[1]) >= _LEAST_JAVA:
            return
        has = f"{java} says {asked.stderr.partition(chr(10))[0]!r}"
    raise SpecError(
        f"planner.engine: Spark runs on Java {_LEAST_JAVA} or later, and {has}; install one, such"
        " as Debian's openjdk-17-jre-headless, or correct JAVA_HOME"
    )


@contextmanager
def _given_to_tasks(spark: SparkSession) -> Iterator[None]:
    """Adds variables for the lake to the environment of the session's tasks."""
    try:
        environment: dict[str, str] = spark.sparkContext.environment
    # Spark Connect has no context, and says so by an error of its own.
    except Exception:  # noqa: BLE001
        environment = {}
    names = [name for name in os.environ if name.startswith(_LAKE) and name not in environment]
    environment.update({name: os.environ[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del environment[name]


def _check_executors(spark: SparkSession) -> None:
    """Refuse executors that lack this package, or have another release of it (`SpecError`)."""
    from pyspark.errors import PythonException
    from pyspark.sql.functions import col, udf

    def probe(_: int) -> str:  # sent whole, as all nested functions are
        import importlib
        import sys

        try:
            version = str(importlib.import_module("batchllm_operator").__version__)
            for name in ("pandas", "pyarrow"):
                importlib.import_module(name)
            return version
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver says it
            return f"{type(error).__name__}: {error} ({sys.executable})"

    # Not `mapInArrow`: without pyarrow it fails before it calls the function.
    ask = udf(probe, "string", useArrow=False)
    with named_failures("Spark's first task failed"):
        try:
            (row,) = spark.range(1).select(ask(col("id"))).collect()
            release = str(row[0])
        except PythonException as error:  # such as another release of Python
            release = reason_of(error)
    if release != __version__:
        raise SpecError(
            f"planner.engine: Spark's executors lack batchllm_operator {__version__}, the driver's"
            f" release: {release}; use one image for both, or a packed environment (spark.archives)"
        )
