"""What a job needs of Spark, Java and executors, checked before it begins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchllm_operator import __version__
from batchllm_operator.errors import SpecError
from batchllm_operator.spark.tasks import named_failures, reason_of, tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LEAST_SPARK: Final = (4, 1)
_LEAST_JAVA: Final = 17


def check_version(spark: SparkSession) -> None:
    """Refuse a Spark without what we use (`SpecError`)."""
    major, minor = spark.version.split(".")[:2]
    if (int(major), int(minor)) < _LEAST_SPARK:
        least = ".".join(map(str, _LEAST_SPARK))
        raise SpecError(
            f"planner.engine: needs Spark {least} or later, and the session has {spark.version}"
        )


def check_java() -> None:
    """Refuse a machine without Java that Spark can run on (`SpecError`)."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    needs = f"Spark runs on Java {_LEAST_JAVA} or later"
    if shutil.which(java) is None:
        install = "PATH has none; install one, such as Debian's openjdk-17-jre-headless"
        mend = f"JAVA_HOME ({home}) has none; correct it, or unset it" if home else install
        raise SpecError(f"planner.engine: {needs}, and {mend}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?([0-9]+)', said)
    if found is None or int(found[1]) < _LEAST_JAVA:
        lines = said.strip().splitlines()
        raise SpecError(f"planner.engine: {needs}, not on {java}: {next(iter(lines), 'it fails')}")


def check_executors(spark: SparkSession) -> None:
    """Refuse executors that lack this package, or have another release of it.

    Raises:
        SpecError: they do.
        SparkJobError: they can't be asked.
    """
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
    with named_failures("Spark's first task failed"):
        try:
            (row,) = tasks(spark, [b""]).select(ask(col("payload"))).collect()
            found = str(row[0])
        except PythonException as error:  # such as another release of Python
            found = reason_of(error)
    if found != __version__:
        raise SpecError(
            f"planner.engine: Spark's executors lack batchllm_operator {__version__}, the driver's"
            f" release: {found}; use one image for both, or a packed environment (spark.archives)"
        )
