"""The task that plans a job on Spark by `spark-submit`; needs Airflow's provider for Spark."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import Context

from batchllm_operator.errors import ERROR_MARK, FINAL_EXIT_CODES
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.spark import APPLICATION, SparkPlanning

_EXIT_CODE: Final = re.compile(r"Error code is: ([0-9]+)")
_OURS: Final = ("application_args", "env_vars", "java_class")


class BatchLLMSparkSubmitPlanOperator(SparkPlanning, SparkSubmitOperator):
    """A `SparkSubmitOperator` that plans a job for one partition; XComs as `BatchLLMPlanOperator`.

    In deploy mode `client` the driver is a child process of the worker: `env` and the credentials
    are in its environment, from which executors get `AWS_*` and `PYICEBERG_*`. In `cluster` mode it
    has neither, because they would stand in `spark-submit`'s command line: give them to Spark in
    your cluster's way, and `application` as a path that the driver can read.

    Args:
        conn_id: Airflow connection of type `spark` with the master, as for the provider.
        conf: Spark's settings; by default it logs warnings only, so that the progress is seen.
        kwargs: see `SparkPlanning`, and the provider's operator for memory, cores, archives.

    Raises:
        ValueError: an argument that is this operator's own was given.
    """

    template_fields = (*SparkPlanning.spark_fields, *SparkSubmitOperator.template_fields)
    template_fields_renderers: ClassVar = BatchLLMCommandOperator.template_fields_renderers
    ui_color = SparkPlanning.ui_color

    def __init__(self, **kwargs: Any) -> None:
        for name in _OURS:
            if name in kwargs:
                raise ValueError(
                    f"{name} can't be set: the driver's command is this operator's own"
                )
        kwargs.setdefault("application", APPLICATION)
        kwargs["conf"] = {"spark.log.level": "WARN", **(kwargs.get("conf") or {})}
        super().__init__(**kwargs)
        self._has_name = "name" in kwargs

    def execute(self, context: Context) -> Any:
        """Submit the application, wait for its end, and check the plan."""
        self.check()
        self.application_args = self.driver_arguments(context)
        if not self._has_name:
            self.name = self.application_name()
        driver = {"PYSPARK_DRIVER_PYTHON": sys.executable, **os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            with _environment(self.credentials().added_to(driver | dict(self.env or {}))):
                super().execute(context)
        except AirflowException as error:
            code = _EXIT_CODE.search(str(error))
            if code is None or int(code[1]) not in FINAL_EXIT_CODES:
                raise
            reason = str(error).rpartition(ERROR_MARK)[2].partition("\n")[0]
            raise AirflowFailException(f"batchllm plan: {reason} (exit code {code[1]})") from error
        return self.planned(context)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment meanwhile, which `spark-submit` takes over; a task has its own."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
