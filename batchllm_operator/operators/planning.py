"""Tasks that plan a job for one partition: what they have in common wherever they do so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Final

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import BaseOperator, Context

from batchllm_operator.errors import SpecError
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs.end import JobEnd
from batchllm_operator.operators.jobs.owner import LABEL
from batchllm_operator.operators.jobs.pod import JOB_UID
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator, number_of_workers
from batchllm_operator.spec import JobSpec, load_spec

PLAN_URI_KEY: Final = "plan_uri"
NUM_WORKERS_KEY: Final = "num_workers"


class Planning(BaseOperator):
    """Base of operators that plan, beside one of Airflow's; `BatchLLMPlanOperator` explains it."""

    # `report_root` is templated only because Airflow keeps template fields with the parsed DAG.
    planning_fields = ("spec_path", "ds", "num_workers", "report_root")

    def __init__(
        self,
        *,
        spec_path: str,
        ds: str = "{{ ds }}",
        num_workers: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        is_late = num_workers is None or isinstance(num_workers, str)  # rendered, if it is a text
        if not is_late and (type(num_workers) is not int or num_workers < 1):
            raise ValueError(f"num_workers is {num_workers!r}; it must be an integer from 1")
        super().__init__(**kwargs)
        self.spec_path, self.ds, self.num_workers = spec_path, ds, num_workers
        self.report_root = _report_root(spec_path)

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """As Airflow does; `AirflowFailException` for a `ds` that needs an absent logical date."""
        from jinja2 import UndefinedError

        if context.get("logical_date") is None:
            try:
                self.render_template(self.ds, context, jinja_env or self.get_template_env())
            except UndefinedError as error:
                raise AirflowFailException(self._no_partition(str(error))) from None
        super().render_template_fields(context, jinja_env)

    def _no_partition(self, why: str) -> str:
        return (
            f"{self.spec_path}: nothing says which partition this run is for ({why}), as the run"
            " has no logical date: trigger it with one, or give the task group a `ds` that the run"
            ' has, such as ds="{{ dag_run.conf[\'ds\'] }}" with the conf {"ds": "2026-01-31"}, or'
            " ds=one_run_per_partition(...)"
        )

    def check(self) -> None:
        """Refuse a run without a partition, and a number of workers that renders to none."""
        if self.ds.strip() in ("", "None"):
            raise AirflowFailException(self._no_partition(f"ds is {self.ds!r}"))
        number_of_workers(self.num_workers or 1, at_least=1)

    def identity(self) -> tuple[str, str]:
        return self.spec.output.uri, " ".join(self.job_arguments)

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        """Push the plan's URI, counts and number of workers, and return the counts."""
        send_stage("plan", context, result)
        summary = uris_and_counts(result)
        wanted = number_of_workers(self.num_workers or self.spec.planner.num_shards or 1)
        num_workers = min(wanted, int(result["num_shards"]))
        xcoms = {PLAN_URI_KEY: str(result["plan_uri"]), "plan": summary}
        for key, value in (xcoms | {NUM_WORKERS_KEY: num_workers}).items():
            context["ti"].xcom_push(key=key, value=value)
        return summary

    @cached_property
    def spec(self) -> JobSpec:
        """The job; `AirflowFailException` if it can't be read or is wrong."""
        try:
            return load_spec(self.spec_path)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error

    @property
    def job_arguments(self) -> list[str]:
        """The job and its partition, for a command that can't read the spec's file."""
        return ["--job-json", self.spec.model_dump_json(exclude_unset=True), "--ds", self.ds]


class BatchLLMPlanOperator(Planning, BatchLLMStageOperator):
    """Builds the prefix plan of a job for one partition of its input table.

    Runs `batchllm plan`, in the worker or, with `runner="kubernetes"`, in the pod of a Job that
    needs no GPU. Planning the same partition again gives the same plan.

    XComs: `plan_uri` is the plan's URI, `plan` the URI and all counts, `num_workers` how many
    workers share it, for `BatchLLMGenerateOperator`: at most as many as there are shards.

    Args:
        spec_path: the job spec, a YAML file that the worker can read (templated). A pod gets
            its content, with absolute local paths, which must be valid there, too.
        ds: the partition (templated); by default the run's logical date.
        num_workers: workers that share the plan, or one for each shard if there are fewer
            (templated). The plan doesn't depend on it. None: a worker for each shard if the spec
            says how many (`planner.num_shards`), else one worker.
        kwargs: see `BatchLLMJobOperator`.

    Raises:
        ValueError: `num_workers` isn't a positive integer.
    """

    template_fields = (*Planning.planning_fields, *BatchLLMStageOperator.template_fields)
    ui_color = "#cde6d0"
    component: ClassVar[str] = "plan"

    def command(self, context: Context) -> list[str]:
        return ["plan", "--job", self.spec_path, "--ds", self.ds]

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm plan` with the spec itself, and a record for `verify` under the Job's UID."""
        return ["plan", *self.job_arguments, "--record", JOB_UID]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        if end is None:  # only a Job can have left results
            return ""
        return self.run_verify(*self.job_arguments, "--record", end.uid)

    def stage_labels(self) -> dict[str, str]:
        return {f"{LABEL}/job": self.spec.name}


def _report_root(spec_path: str) -> str | None:
    """The folder of plans, the root of the pages; None if the spec isn't readable here."""
    try:
        spec = load_spec(spec_path)
    except (SpecError, TypeError):
        return None
    root = f"{spec.output.staging_folder.rstrip('/')}/_batchllm/{spec.name}"
    return None if "{" in root else root  # Airflow would render it
