"""The task that plans a job on Spark by a SparkApplication, for Kubeflow's Spark operator."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar, Final

from airflow.providers.cncf.kubernetes.operators.spark_kubernetes import SparkKubernetesOperator
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context

from batchllm_operator.operators.jobs.pod import escaped
from batchllm_operator.operators.spark.planning import SparkPlanning

_MAX_NAME: Final = 40
"""Spark appends a suffix, and names Services after the application."""


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
        **SparkPlanning.spark_renderers,
    }
    template_ext: Any = ()  # the file is read by the worker, and is no template
    ui_color = "#cde6d0"

    def __init__(self, *, namespace: str | None = None, **kwargs: Any) -> None:
        if kwargs.setdefault("deferrable", False):
            raise ValueError("deferrable can't be set with runner='spark'")
        self._has_namespace = namespace is not None
        super().__init__(namespace=namespace or "default", **kwargs)

    def execute(self, context: Context) -> Any:
        """Create the application, follow its driver to the end, and check the plan.

        Raises:
            AirflowFailException: the spec, the template or a connection is wrong.
            AirflowException: the application failed, or the task was killed.
        """
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
        """The template with the driver's arguments."""
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


OPERATOR: Final = BatchLLMSparkKubernetesPlanOperator
