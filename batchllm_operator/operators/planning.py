"""What every task that plans has, wherever it does so: the job, the limits, the XComs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import BaseOperator, Context

from batchllm_operator.errors import SpecError
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.spec import JobSpec, load_spec

if TYPE_CHECKING:
    from jinja2 import Environment

PLAN_URI_KEY: Final = "plan_uri"
SUMMARY_KEY: Final = "plan"
NUM_WORKERS_KEY: Final = "num_workers"


class Planning(BaseOperator):
    """Base of operators that plan, beside one of Airflow's; `BatchLLMPlanOperator` explains it.

    Raises:
        ValueError: `num_workers` isn't a positive integer.
    """

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
        check_num_workers(num_workers)
        super().__init__(**kwargs)
        self.spec_path = spec_path
        self.ds = ds
        self.num_workers = num_workers
        self.report_root = _report_root(spec_path)

    def render_template_fields(
        self, context: Context, jinja_env: Environment | None = None
    ) -> None:
        """Render them as Airflow does.

        Raises:
            AirflowFailException: `ds` needs a logical date, and the run has none.
        """
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
        try:
            int(self.num_workers or 1)
        except ValueError:
            message = f"num_workers is {self.num_workers!r}; it must be an integer from 1"
            raise AirflowFailException(message) from None

    def work(self) -> str:
        return " ".join(self.job_arguments)

    def table_uri(self) -> str:
        return self.spec.output.uri

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        """Push the plan's URI, counts and number of workers, and return the counts."""
        send_stage("plan", context, result)
        summary = uris_and_counts(result)
        wanted = int(self.num_workers or self.spec.planner.num_shards or 1)
        num_workers = min(wanted, int(result["num_shards"]))
        for key, value in (
            (PLAN_URI_KEY, str(result["plan_uri"])),
            (SUMMARY_KEY, summary),
            (NUM_WORKERS_KEY, num_workers),
        ):
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


def check_num_workers(number: Any) -> None:
    """Raise `ValueError` unless it is None, a positive integer or a text, which Airflow renders."""
    if number is None or isinstance(number, str):
        return
    if type(number) is not int or number < 1:
        raise ValueError(f"num_workers is {number!r}; it must be an integer from 1")


def _report_root(spec_path: str) -> str | None:
    """The folder of the job's plans, to which the pages in Airflow are confined.

    None if the spec can't be read: its path is a template, or isn't on the machine that parses
    the DAG.
    """
    try:
        spec = load_spec(spec_path)
    except (SpecError, TypeError):
        return None
    root = f"{spec.output.staging_folder.rstrip('/')}/_batchllm/{spec.name}"
    return None if "{" in root else root  # Airflow would render it
