"""What all tasks that plan have in common: the job, the partition of the run, their XComs."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final
from zoneinfo import available_timezones

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context, XComArg
from jinja2 import UndefinedError

from batchllm_operator.errors import SpecError
from batchllm_operator.operators.assets import readable_spec
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs.job_operator import number_of_workers
from batchllm_operator.operators.jobs.owner import LABEL
from batchllm_operator.operators.lineage import WithLineage
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.spec import JobSpec, load_spec

PLAN_URI_KEY: Final = "plan_uri"
NUM_WORKERS_KEY: Final = "num_workers"
_DS: Final = "{{ dag_run.partition_key or ds }}"
_MOMENT: Final = "((partition_date | default(none)) or logical_date)"  # 3.2 lacks the first


class Planning(WithLineage):
    """Base of operators that plan, beside one of Airflow's; `BatchLLMPlanOperator` explains it."""

    # `report_root` is templated only because Airflow keeps template fields with the parsed DAG.
    planning_fields = ("spec_path", "ds", "num_workers", "report_root")

    def __init__(
        self,
        *,
        spec_path: str | XComArg,
        ds: str | None = None,
        ds_timezone: str | None = None,
        num_workers: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        is_late = num_workers is None or isinstance(num_workers, str)  # rendered, if it is a text
        if not is_late and (type(num_workers) is not int or num_workers < 1):
            raise ValueError(f"num_workers is {num_workers!r}; it must be an integer from 1")
        if ds is not None and ds_timezone is not None:
            raise ValueError(
                "give ds or ds_timezone, not both: the time zone is that of ds's default"
            )
        if ds_timezone is not None and ds_timezone not in available_timezones():
            raise ValueError(f"ds_timezone is {ds_timezone!r}; write one such as Europe/Berlin")
        super().__init__(**kwargs)
        default = _DS
        if ds_timezone is not None:
            local = f"{_MOMENT}.in_timezone({ds_timezone!r})"
            default = "{{ " + local + ".to_date_string() }}"
        self.ds = default if ds is None else ds
        self.spec_path: Any = spec_path
        self.num_workers = num_workers
        self.report_root = _report_root(spec_path)

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """As Airflow does; `AirflowFailException` for a `ds` that needs an absent logical date."""
        if context.get("logical_date") is None:
            try:
                self.render_template(self.ds, context, jinja_env or self.get_template_env())
            except UndefinedError as error:
                raise AirflowFailException(self._no_partition(str(error))) from None
        super().render_template_fields(context, jinja_env)

    def _no_partition(self, why: str) -> str:
        name = self.spec_path if isinstance(self.spec_path, str) else "the job"
        return (
            f"{name}: nothing says which partition this run is for ({why}), as the run"
            " has no logical date: trigger it with one or with a partition key, or give the task"
            " group a `ds` that the run has, such as ds=\"{{ dag_run.conf['ds'] }}\" with the conf"
            ' {"ds": "2026-01-31"}, or ds=one_run_per_partition(...)'
        )

    def check(self) -> None:
        """Refuse a run without a partition, and a number of workers that renders to none."""
        if self.ds.strip() in ("", "None"):
            raise AirflowFailException(self._no_partition(f"ds is {self.ds!r}"))
        if self.num_workers is not None:
            number_of_workers(self.num_workers, at_least=1)

    def known_tables(self) -> dict[str, Any]:
        spec = readable_spec(self.spec_path)
        return {"input": {"uri": spec.input.uri}} if spec else {}

    def identity(self) -> tuple[str, str, dict[str, str]]:
        work = " ".join(self.job_arguments)
        return self.spec.output.uri, work, {f"{LABEL}/job": self.spec.name}

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
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


def _report_root(spec_path: Any) -> str | None:
    """The folder of plans, the root of the pages; None if the spec isn't readable here."""
    if (spec := readable_spec(spec_path)) is None:
        return None
    root = f"{spec.output.staging_folder.rstrip('/')}/_batchllm/{spec.name}"
    return None if "{" in root else root  # Airflow would render it
