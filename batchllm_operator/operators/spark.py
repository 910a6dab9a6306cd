"""Plans on Spark as a task; the operator for `spark-submit` is in `spark_submit`."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.providers.cncf.kubernetes.operators.spark_kubernetes import SparkKubernetesOperator
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context

import batchllm_operator
from batchllm_operator.operators.command import BatchLLMCommandOperator
from batchllm_operator.operators.jobs.owner import Attempt
from batchllm_operator.operators.jobs.pod import escaped
from batchllm_operator.operators.planning import Planning

APPLICATION: Final = str(Path(batchllm_operator.__file__).parent / "spark_driver.py")
"""What Spark's driver runs; its arguments are those of `batchllm`."""
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

    def driver_arguments(self, context: Any) -> list[str]:
        return ["plan", "--on", "spark", *self._recorded(context)]

    def planned(self, context: Any) -> dict[str, str | int | float]:
        """The task's value, once an application has ended well and left the record of a plan."""
        return self.finish(context, self.run_command("verify", *self._recorded(context)))

    def _recorded(self, context: Any) -> list[str]:
        attempt = Attempt.of(context["ti"], *self.identity())
        return [*self.job_arguments, "--record", f"spark-{attempt.owner}"]


class BatchLLMSparkKubernetesPlanOperator(SparkPlanning, SparkKubernetesOperator):
    """A `SparkKubernetesOperator` that plans a job for one partition.

    XComs are those of `BatchLLMPlanOperator`. The task's log shows the driver's. The driver gets
    neither `env` nor credentials of this task, which anyone who may read a SparkApplication could
    read there: the application names its Secrets. They are for the check in the worker.

    Args:
        application_file: a SparkApplication, such as the chart's `spark.yaml`, without arguments.
        template_spec: the same as a dictionary.
        namespace: by default the application's own.
        kwargs: see `SparkPlanning`, and the provider's operator.

    Raises:
        ValueError: `deferrable` is true: nothing would check the plan at the end.
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
        """Create the application, follow its driver to the end, and check the plan."""
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
        spec["arguments"] = list(map(escaped, self.driver_arguments(context)))
        return body


def spark_plan_operator(**arguments: Any) -> Any:
    """The operator for `runner="spark"`: for a SparkApplication if one is given, else spark-submit.

    Raises `ImportError` if that needs Airflow's provider for Spark, which isn't installed.
    """
    if arguments.keys() & {"application_file", "template_spec"}:
        return BatchLLMSparkKubernetesPlanOperator(**arguments)
    try:
        module = import_module("batchllm_operator.operators.spark_submit")
    except ModuleNotFoundError as error:
        raise ImportError(
            'plan_args: runner="spark" without an application_file takes Airflow\'s provider for'
            f" Spark, the extra airflow-spark of batchllm-operator ({error})"
        ) from error
    return module.BatchLLMSparkSubmitPlanOperator(**arguments)
