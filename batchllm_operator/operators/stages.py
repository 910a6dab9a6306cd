"""The stages of a job as tasks: plan, generate, commit."""

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Asset, BaseOperator, Context, XComArg
from jinja2 import UndefinedError

from batchllm_operator.amounts import counted
from batchllm_operator.errors import SpecError
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs import pod as pods
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_operator import number_of_workers
from batchllm_operator.operators.jobs.owner import LABEL, job_of
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator
from batchllm_operator.spec import JobSpec, load_spec

PLAN_URI_KEY: Final = "plan_uri"
NUM_WORKERS_KEY: Final = "num_workers"
_EVENT_FIELDS: Final = (
    *("ds", "num_rows_in", "num_rows_out", "num_failed_rows", "achieved_saving_ratio"),
    *("plan_uri", "report_uri", "table_uri"),
)


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
        if self.num_workers is not None:
            number_of_workers(self.num_workers, at_least=1)

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


class BatchLLMPlanOperator(Planning, BatchLLMStageOperator):
    """Builds the prefix plan of a job for one partition of its input table.

    Runs `batchllm plan`, in the worker or, with `runner="kubernetes"`, in the pod of a Job that
    needs no GPU. Planning the same partition again gives the same plan or, once it is finished, the
    next round's.

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
    """

    template_fields = (*Planning.planning_fields, *BatchLLMStageOperator.template_fields)
    ui_color = "#cde6d0"
    component: ClassVar[str] = "plan"

    def command(self, context: Context) -> list[str]:
        return ["plan", "--job", self.spec_path, "--ds", self.ds]

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm plan` with the spec itself, and a record for `verify` under the Job's UID."""
        return ["plan", *self.job_arguments, "--record", pods.JOB_UID]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        if end is None or self._job is None:  # only a Job can have left results
            return ""
        return self.run_verify(*self.job_arguments, "--record", self._job.of.uid)


class BatchLLMPlannedOperator(BatchLLMStageOperator):
    """A stage of a plan that exists: its `plan_uri` is a URI (templated), or an XCom with it."""

    template_fields = ("plan_uri", *BatchLLMStageOperator.template_fields)

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    @property
    def plan_arguments(self) -> list[str]:
        return ["--plan", str(self.plan_uri)]

    def identity(self) -> tuple[str, str, dict[str, str]]:
        """The table, or the staging folder if the job has one, and the plan."""
        uri = str(self.plan_uri)
        labels = {f"{LABEL}/job": job_of(uri), f"{LABEL}/plan": uri.rstrip("/").rpartition("/")[2]}
        return uri.partition("/_batchllm/")[0], " ".join(self.plan_arguments), labels


class BatchLLMGenerateOperator(BatchLLMPlannedOperator):
    """Generates the outputs of a plan's shards; finished parts are skipped.

    Runs `batchllm run` in the Airflow worker, or in the pods of one Indexed Job, each of which is a
    worker that takes shards until none is left. The task succeeds when each shard of the plan is
    finished, whatever its pods did. The return value holds the plan's URI and the counts of the
    shards that the task has finished.

    Args:
        num_workers: pods of the Job (templated). It may change while the Job runs: when a deferred
            task looks at the lake, or a task is tried again, it scales the Job, unless that has a
            `queue_name`. 0 for a plan without shards. In the Airflow worker there is one worker,
            whatever the number.
        look_interval: how often the task looks whether the plan is whole, and otherwise, without a
            queue, removes waiting pods for which nothing is left, until something is again.
        kwargs: `plan_uri`, and see `BatchLLMJobOperator`; the pod's grace period is refused if it
            leaves no time to finish open parts (`ValueError`).
    """

    template_fields = ("num_workers", *BatchLLMPlannedOperator.template_fields)
    ui_color = "#f4dfc8"
    component: ClassVar[str] = "run"

    def __init__(
        self,
        *,
        num_workers: int | str | XComArg = 1,
        look_interval: timedelta = timedelta(minutes=5),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_workers, self.look_interval = num_workers, look_interval
        pods.check_grace(pods.grace_of(self))

    def num_pods(self) -> int:
        return number_of_workers(self.num_workers)

    def command(self, context: Context) -> list[str]:
        num_gpus = self.gpu_count if self.gpu is not None else 0
        return self._run_command(self._attempt(context).owner, num_gpus)

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm run` with the pod's GPUs; open parts may finish within the grace period."""
        pods.check_grace(grace_s)  # of a template file
        # By its owner a pod takes up at once what the one before it of its index has left.
        command = self._run_command(f"{self._attempt(context).owner}/{pods.INDEX}", num_gpus)
        share = ["--worker", pods.INDEX, "--num-workers", str(self.num_pods())]
        return [*command, *share, "--drain-s", str(grace_s - pods.DRAIN_MARGIN_S)]

    def _run_command(self, owner: str, num_gpus: int) -> list[str]:
        gpus = ["--num-gpus", str(num_gpus)] if num_gpus else []
        return ["run", *self.plan_arguments, "--owner", owner, *gpus]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The counts of this task's shards if the whole plan is finished."""
        owner = ["--owner", self._attempt(context).owner]
        result = self.run_verify(*self.plan_arguments, *owner)
        return _lacking(result) or result

    def look(self, context: Context, end: JobEnd) -> bool:
        """Whether the plan is whole; scales the Job if `num_workers` or what is left has changed.

        A Job in a queue isn't scaled: Kueue would stop all of its pods, and queue it again. Shards
        are judged by their reports: the parts are checked once, at the end.
        """
        num_pods = self.num_pods()
        share = ["--worker", "0", "--num-workers", str(max(1, num_pods))]
        result = self.run_verify(*self.plan_arguments, *share)
        if not (lacking := _lacking(result)):
            return True
        is_free = isinstance(result, str)
        self.log.info("In the lake: %s", lacking)
        if self.queue_name is not None or not num_pods or not end.num_pods:
            return False
        if num_pods != end.num_pods:
            self.log.info("Scaling the Job from %d to %d workers", end.num_pods, num_pods)
            self.scale(num_pods, num_pods)
        elif is_free and end.parallelism < num_pods:
            self.log.info("Something is left again for all %s", counted(num_pods, "worker"))
            self.scale(num_pods)
        elif not is_free and end.num_running and end.num_waiting:
            self.log.info("Nothing is left for %s", counted(end.num_waiting, "waiting pod"))
            self.scale(end.num_running)
        return False

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        send_stage("generate", context, result)
        return uris_and_counts(result)


class BatchLLMCommitOperator(BatchLLMPlannedOperator):
    """Checks that every row of a plan is answered and publishes the partition in one step.

    Runs `batchllm commit`, in the worker or, with `runner="kubernetes"`, in the pod of a Job; twice
    is harmless. The return value holds the URIs of table and report, and the report's counts.

    Each `Asset` among the task's `outlets` gets an event with the partition (`ds`), the rows in,
    out and failed, the saving ratio and the URIs of plan, report and table. A task that is tried
    again sends another: two events for one `ds` with the same `plan_uri` stand for the same rows.
    Arguments: `plan_uri`, and see `BatchLLMJobOperator`.
    """

    ui_color = "#e2d5ef"
    component: ClassVar[str] = "commit"

    def command(self, context: Context) -> list[str]:
        return ["commit", *self.plan_arguments]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The report's figures, once a Job has ended well; before, it is an earlier commit's."""
        if end is None:
            return ""
        if end.kind is not EndKind.COMPLETE:
            return "nothing says that the partition is published"
        return self.run_command("report", *self.plan_arguments)

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        if num_failed := result.get("num_failed_rows"):
            self.log.warning(
                "%s of %s failed, and were published with the reason in column `error`; report: %s",
                f"{num_failed:,}",
                counted(int(result["num_rows_in"]), "row"),
                result["report_uri"],
            )
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra = {n: result[n] for n in _EVENT_FIELDS}
        send_stage("commit", context, result)
        return uris_and_counts(result)


def round_suffixes(spec_path: str | Path) -> list[str]:
    """What ends the ids of tasks of each round; one round if the spec isn't readable here."""
    spec = _readable_spec(str(spec_path))
    num_rounds = 1 if spec is None else len(spec.rounds)
    return ["", *(f"_{number}" for number in range(2, num_rounds + 1))]


def _readable_spec(spec_path: str) -> JobSpec | None:
    try:
        return load_spec(spec_path)
    except (SpecError, TypeError):
        return None


def _report_root(spec_path: str) -> str | None:
    """The folder of plans, the root of the pages; None if the spec isn't readable here."""
    if (spec := _readable_spec(spec_path)) is None:
        return None
    root = f"{spec.output.staging_folder.rstrip('/')}/_batchllm/{spec.name}"
    return None if "{" in root else root  # Airflow would render it


def _lacking(result: Mapping[str, Any] | str) -> str:
    """What `verify` says that the plan lacks; empty if nothing."""
    if isinstance(result, str) or result["num_finished"] == result["num_shards"]:
        return result if isinstance(result, str) else ""
    total = counted(result["num_shards"], "shard")
    return f"{result['num_finished']:,} of {total} finished, and workers run the rest"
