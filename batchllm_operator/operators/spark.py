"""Plans on Spark as a task: by `spark-submit`, or as a SparkApplication in a cluster."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.providers.cncf.kubernetes.operators.spark_kubernetes import SparkKubernetesOperator
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk import BaseOperator, Context

import batchllm_operator
from batchllm_operator.errors import ERROR_MARK, FINAL_EXIT_CODES
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs.owner import Attempt
from batchllm_operator.operators.jobs.pod import escaped
from batchllm_operator.operators.planning import Planning

try:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
except ModuleNotFoundError:

    class SparkSubmitOperator(BaseOperator):  # type: ignore[no-redef]
        def __init__(self, **_: Any) -> None:
            raise ImportError(
                'plan_args: runner="spark" without an application_file takes Airflow\'s provider'
                " for Spark, the extra airflow-spark of batchllm-operator"
            )


APPLICATION: Final = str(Path(batchllm_operator.__file__).parent / "spark_driver.py")
"""What Spark's driver runs; its arguments are those of `batchllm`."""
_PLAN: Final = ("plan", "--on", "spark")
_EXIT_CODE: Final = re.compile(r"Error code is: ([0-9]+)")
_OURS: Final = {"application_args", "env_vars", "java_class"}
_MAX_NAME: Final = 40  # Spark appends a suffix, and names Services after the application


class SparkPlanning(Planning, BatchLLMCommandOperator):
    """Runs `batchllm plan --on spark` as a Spark application, beside one of Airflow's operators.

    The plan counts when Spark says that the application ended well, and `batchllm verify`, run in
    the worker, finds its record and the plan in the lake. The record's name is the same for all
    tries of a task, because a retry may take up the application of an earlier try.

    Arguments are those of Airflow's operator, of `BatchLLMPlanOperator`, and of
    `BatchLLMCommandOperator`, for the command in the worker, and for the driver if that runs there.
    """

    spark_fields = (*Planning.planning_fields, *BatchLLMCommandOperator.template_fields)
    ui_color = "#cde6d0"

    def application_name(self) -> str:
        return f"batchllm-{self.spec.name}-plan"

    def recorded(self, context: Any) -> list[str]:
        """The arguments that driver and `verify` share."""
        attempt = Attempt.of(context["ti"], *self.identity()[:2])
        return [*self.job_arguments, "--record", f"spark-{attempt.owner}"]

    def planned(self, context: Any) -> dict[str, str | int | float]:
        """The task's value, once an application has ended well and left the record of a plan."""
        return self.finish(context, self.run_command("verify", *self.recorded(context)))


class BatchLLMSparkKubernetesPlanOperator(SparkPlanning, SparkKubernetesOperator):
    """A `SparkKubernetesOperator` that plans a job for one partition.

    XComs are those of `BatchLLMPlanOperator`. The task's log shows the driver's. The driver gets
    neither `env` nor credentials of this task, which anyone who may read a SparkApplication could
    read there: the application names its Secrets. They are for the check in the worker.

    Args:
        application_file: a SparkApplication, such as the chart's `spark.yaml`, without arguments.
        template_spec: the same as a dictionary.
        namespace: by default the application's own.
        kwargs: see `SparkPlanning`, and the provider's operator; it can't be `deferrable`, since
            nothing would check the plan at the end.
    """

    template_fields: Any = (*SparkPlanning.spark_fields, *SparkKubernetesOperator.template_fields)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **SparkKubernetesOperator.template_fields_renderers,
        **BatchLLMCommandOperator.template_fields_renderers,
    }
    template_ext: Any = ()  # the file is read by the worker, and is no template

    def __init__(self, *, namespace: str | None = None, **kwargs: Any) -> None:
        if kwargs.setdefault("deferrable", False):
            raise ValueError("deferrable can't be set with runner='spark'")
        self._has_namespace = namespace is not None
        super().__init__(namespace=namespace or "default", **kwargs)

    def execute(self, context: Context) -> Any:
        self.check()
        self.template_spec, self.application_file = self._application(context), None
        if not self._has_namespace:
            given = self.template_spec["spark"].get("metadata", {})
            self.namespace = given.get("namespace", self.namespace)
        self.name = self.name or self.application_name().replace("_", "-")[:_MAX_NAME].rstrip("-")
        try:
            super().execute(context)
        except Exception:  # the provider leaves one that fails before it runs
            if self.delete_on_termination and "launcher" in vars(self):
                launcher: Any = self.launcher
                launcher.delete_spark_job(self.name)
            raise
        return self.planned(context)

    def _application(self, context: Context) -> dict[str, Any]:
        read: Any = self.manage_template_specs
        try:
            body: dict[str, Any] = deepcopy(read())
            spec = body["spark"]["spec"]
            if not isinstance(spec, dict):
                raise TypeError("its spec is no map")
        except (KeyError, TypeError, ValueError) as error:
            raise AirflowFailException(
                f"{self.application_file or 'template_spec'}: isn't a SparkApplication: {error}"
            ) from error
        arguments = (*_PLAN, *self.recorded(context))
        spec["arguments"] = [escaped(argument) for argument in arguments]
        return body


class BatchLLMSparkSubmitPlanOperator(SparkPlanning, SparkSubmitOperator):
    """A `SparkSubmitOperator` that plans a job for one partition; XComs as `BatchLLMPlanOperator`.

    In deploy mode `client` the driver is a child process of the worker: `env` and the credentials
    are in its environment, from which executors get those of lake and catalogs. In `cluster` mode
    it has neither, because they would stand in `spark-submit`'s command line: give them to Spark in
    your cluster's way, and `application` as a path that the driver can read.

    Args:
        conn_id: Airflow connection of type `spark` with the master, as for the provider.
        conf: Spark's settings; by default it logs warnings only, so that the progress is seen.
        kwargs: see `SparkPlanning`, and the provider's operator for memory, cores, archives.
    """

    template_fields = (*SparkPlanning.spark_fields, *SparkSubmitOperator.template_fields)
    template_fields_renderers: ClassVar = BatchLLMCommandOperator.template_fields_renderers
    ui_color = SparkPlanning.ui_color

    def __init__(self, **kwargs: Any) -> None:
        for name in kwargs.keys() & _OURS:
            raise ValueError(f"{name} can't be set: the driver's command is this operator's own")
        kwargs.setdefault("application", APPLICATION)
        kwargs["conf"] = {"spark.log.level": "WARN", **(kwargs.get("conf") or {})}
        super().__init__(**kwargs)
        self._has_name = "name" in kwargs

    def execute(self, context: Context) -> Any:
        self.check()
        self.application_args = [*_PLAN, *self.recorded(context)]
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


def spark_plan_operator(*, runner: str, **arguments: Any) -> Any:
    """The operator for this `runner`: of a SparkApplication if one is given, or spark-submit."""
    if arguments.keys() & {"application_file", "template_spec"}:
        return BatchLLMSparkKubernetesPlanOperator(**arguments)
    return BatchLLMSparkSubmitPlanOperator(**arguments)
