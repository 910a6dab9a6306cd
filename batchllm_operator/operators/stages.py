"""The stages of a job as tasks: plan, generate, commit."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Final

from airflow.sdk import Asset, Context, XComArg
from airflow.sdk.definitions.asset import AssetRef

from batchllm_operator.amounts import counted
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs import pod as pods
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.jobs.job_operator import number_of_workers
from batchllm_operator.operators.jobs.owner import LABEL, job_of
from batchllm_operator.operators.lineage import WithLineage
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.planning import Planning
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator

_EVENT_FIELDS: Final = (
    *("ds", "num_rows_in", "num_rows_out", "num_failed_rows", "num_logical_tokens"),
    *("num_computed_tokens", "num_output_tokens", "achieved_saving_ratio", "gpu_s", "cost_usd"),
    *("plan_uri", "report_uri", "table_uri"),
)


class BatchLLMPlanOperator(Planning, BatchLLMStageOperator):
    """Builds the prefix plan of a job for one partition of its input table.

    Runs `batchllm plan`, in the worker or, with `runner="kubernetes"`, in the pod of a Job that
    needs no GPU. Planning the same partition again gives the same plan or, once it is finished, the
    next round's.

    XComs: `plan_uri` is the plan's URI, `plan` the URI and all counts, `num_workers` how many
    workers share it, for `BatchLLMGenerateOperator`: at most as many as there are shards.

    Args:
        spec_path: the job spec, a YAML file that the worker can read (templated), or the XCom of a
            task that returns the spec's fields. A pod gets its content, with absolute local paths,
            which must be valid there, too.
        ds: the partition (templated); by default the run's partition key or, without one, the day
            of its logical date, in UTC.
        ds_timezone: such as `Asia/Tokyo`, in its place: the day there of the run's partition date
            or, without one, of its logical date.
        num_workers: workers that share the plan, or one for each shard if there are fewer
            (templated). The plan doesn't depend on it. None: a worker for each shard if the spec
            says how many (`planner.num_shards`), else one worker.
        kwargs: see `BatchLLMJobOperator`.
    """

    template_fields = (*Planning.planning_fields, *BatchLLMStageOperator.template_fields)
    ui_color = "#cde6d0"
    component: ClassVar[str] = "plan"

    def command(self, context: Context) -> list[str]:
        if not isinstance(self.spec_path, str):
            return ["plan", *self.job_arguments]
        return ["plan", "--job", self.spec_path, "--ds", self.ds]

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm plan` with the spec itself, and a record for `verify` under the Job's UID."""
        return ["plan", *self.job_arguments, "--record", pods.JOB_UID]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        if end is None or self._job is None:  # only a Job can have left results
            return ""
        return self.run_verify(*self.job_arguments, "--record", self._job.of.uid)


class BatchLLMPlannedOperator(WithLineage, BatchLLMStageOperator):
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

    Each `Asset` among the task's `outlets` gets an event with the partition (`ds`), rows, tokens,
    saving ratio, GPU seconds and cost, and the URIs of plan, report and table. A task that is tried
    again sends another: two events for one `ds` with the same `plan_uri` stand for the same rows.
    In a run with a partition key, and with `PartitionedAtRuntime`, `ds` is the event's key.
    Arguments: `plan_uri`, and see `BatchLLMJobOperator`.
    """

    template_fields = (*BatchLLMPlannedOperator.template_fields, "outcome")
    overwrite_rtif_after_execution = True  # Airflow shows the outcome among the rendered fields
    ui_color = "#e2d5ef"
    component: ClassVar[str] = "commit"
    outcome = ""

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
        self.outcome = _outcome(result)
        if num_failed := result.get("num_failed_rows"):
            self.log.warning(
                "%s of %s failed, and were published with the reason in column `error`; report: %s",
                f"{num_failed:,}",
                counted(int(result["num_rows_in"]), "row"),
                result["report_uri"],
            )
        for outlet in self.outlets:
            if isinstance(outlet, Asset | AssetRef):
                event = context["outlet_events"][outlet]
                event.extra = {name: result[name] for name in _EVENT_FIELDS}
                # Airflow 3.2 lacks it. With a key, an event starts only DAGs that want keys.
                if _has_partitions(context) and hasattr(event, "add_partitions"):
                    event.add_partitions(result["ds"])
        send_stage("commit", context, result)
        return uris_and_counts(result)


def _outcome(result: Mapping[str, Any]) -> str:
    """Rows, failed ones, saving and cost in a line, as far as they are known."""
    saving, cost = result.get("achieved_saving_ratio"), result.get("cost_usd")
    parts = [counted(result.get("num_rows_in", 0), "row")]
    parts += [f"{result.get('num_failed_rows', 0):,} failed"]
    parts += [] if saving is None else [f"{saving:.1%} of prompt tokens saved"]
    return ", ".join(parts if cost is None else [*parts, f"${cost:,.2f}"])


def _has_partitions(context: Context) -> bool:
    """Whether the run's DAG is one of Airflow's partitions."""
    timetable = getattr(context["dag"], "timetable", None)
    is_late = bool(getattr(timetable, "partitioned_at_runtime", False))
    return is_late or context["dag_run"].partition_key is not None


def _lacking(result: Mapping[str, Any] | str) -> str:
    """What `verify` says that the plan lacks; empty if nothing."""
    if isinstance(result, str) or result["num_finished"] == result["num_shards"]:
        return result if isinstance(result, str) else ""
    total = counted(result["num_shards"], "shard")
    return f"{result['num_finished']:,} of {total} finished, and workers run the rest"
