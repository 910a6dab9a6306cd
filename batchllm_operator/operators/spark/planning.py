"""Plans on Spark as a task: what `spark-submit` and a SparkApplication have in common."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

import batchllm_operator
from batchllm_operator.operators.command import CommandRunner
from batchllm_operator.operators.credentials import Credentials
from batchllm_operator.operators.jobs.owner import Attempt
from batchllm_operator.operators.planning import Planning

APPLICATION: Final = str(Path(batchllm_operator.__file__).parent / "spark_driver.py")
"""What Spark's driver runs; its arguments are those of `batchllm`."""


class SparkPlanning(Planning):
    """Runs `batchllm plan --on spark` as a Spark application, beside one of Airflow's operators.

    The plan counts when Spark says that the application ended well, and `batchllm verify`, run in
    the worker, finds its record and the plan in the lake. The record's name is the same for all
    tries of a task, because a retry may take up the application of an earlier try. Planning the
    same partition again gives the same plan.

    Args:
        env: as for `BatchLLMCommandOperator`, for the command in the worker, and for the driver if
            that runs there.
        aws_conn_id: likewise.
        connection_env: likewise.
        kill_grace_s: seconds that the command in the worker gets to stop.
        kwargs: those of Airflow's operator, and of `BatchLLMPlanOperator`: `spec_path`, `ds`,
            `num_workers`.
    """

    spark_fields = (*Planning.planning_fields, "env", "aws_conn_id", "connection_env")
    spark_renderers: ClassVar[dict[str, str]] = {"env": "json", "connection_env": "json"}

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        aws_conn_id: str | None = None,
        connection_env: Mapping[str, str] | None = None,
        kill_grace_s: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.env, self.aws_conn_id, self.connection_env = env, aws_conn_id, connection_env
        self.kill_grace_s = kill_grace_s
        self._commands: CommandRunner | None = None

    def application_name(self) -> str:
        """Such as `batchllm-snippets-plan`, for people."""
        return f"batchllm-{self.spec.name}-plan"

    def driver_arguments(self, context: Any) -> list[str]:
        """The arguments of `batchllm` in the driver."""
        record = ["--record", self._record(context)]
        return ["plan", "--on", "spark", *self.job_arguments, *record]

    def credentials(self) -> Credentials:
        """What the named connections hold; raises `AirflowFailException` if one is wrong."""
        return Credentials.of(self.aws_conn_id, self.connection_env)

    def planned(self, context: Any) -> dict[str, str | int | float]:
        """Check the plan of an application that has ended well, and return the task's value.

        Raises:
            AirflowFailException: see `CommandRunner.run`.
            AirflowException: it left no record, or the check failed; a retry plans again.
        """
        self._commands = CommandRunner(self.log, self.env, self.credentials(), self.kill_grace_s)
        arguments = [*self.job_arguments, "--record", self._record(context)]
        return self.finish(context, self._commands.run("verify", *arguments))

    def on_kill(self) -> None:
        if self._commands is not None:
            self._commands.stop("the task was killed")
        super().on_kill()

    def _record(self, context: Any) -> str:
        return f"spark-{Attempt.of(context['ti'], self.table_uri(), self.work()).owner}"


def spark_plan_operator(**arguments: Any) -> Any:
    """The operator for `runner="spark"`.

    `BatchLLMSparkKubernetesPlanOperator` if a SparkApplication is given (`application_file`,
    `template_spec`), else `BatchLLMSparkSubmitPlanOperator`.

    Raises `ImportError`: it would be the latter, and Airflow's provider for Spark isn't installed.
    """
    is_given = bool(arguments.keys() & {"application_file", "template_spec"})
    where = "kubernetes" if is_given else "submit"
    try:
        module = import_module(f"batchllm_operator.operators.spark.{where}")
    except ModuleNotFoundError as error:
        raise ImportError(
            'plan_args: runner="spark" without an application_file takes Airflow\'s provider for'
            f" Spark, the extra airflow-spark of batchllm-operator ({error})"
        ) from error
    return module.OPERATOR(**arguments)
