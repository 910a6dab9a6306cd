"""The task that plans a job for one partition."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Final

from airflow.providers.common.compat.sdk import AirflowFailException, conf
from airflow.sdk import Context

from batchllm_operator.errors import SpecError
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.pods.owner import LABEL
from batchllm_operator.operators.pods.spec import UID_PLACE
from batchllm_operator.operators.stage import BatchLLMStageOperator
from batchllm_operator.spec import JobSpec, load_spec

PLAN_URI_KEY: Final = "plan_uri"
SUMMARY_KEY: Final = "plan"
_MAX_MAP_LENGTH: Final = 1024
"""Airflow's default."""


class BatchLLMPlanOperator(BatchLLMStageOperator):
    """Builds the prefix plan of a job for one partition of its input table.

    Runs `batchllm plan`, in the worker or, with `runner="kubernetes"`, in a pod of its own
    that needs no GPU. Planning the same partition again gives the same plan.

    XComs: the return value is one `{"plan_uri": ..., "worker": ..., "num_workers": ...}` per
    worker, or one `{"plan_uri": ..., "shard_idx": ...}` per shard, for
    `BatchLLMGenerateOperator.partial(...).expand_kwargs(plan.output)` (Airflow maps over
    return values only; the list is empty for a partition without rows). `plan_uri` is the
    plan's URI, `plan` the URI and all counts. More of them than Airflow maps a task over
    (`[core] max_map_length`, 1,024) are refused before anything is planned.

    Args:
        spec_path: the job spec, a YAML file that the worker can read (templated). A pod gets
            its content, with absolute local paths, which must be valid there, too.
        ds: the partition (templated); by default the run's logical date.
        num_workers: workers that share the plan, or one for each shard if there are fewer. The
            plan doesn't depend on it. None: a task for each shard if the spec says how many
            (`planner.num_shards`), else one worker.
        kwargs: see `BatchLLMPodOperator`.

    Raises:
        ValueError: `num_workers` isn't a positive integer.
    """

    # `report_root` is templated only because Airflow keeps template fields with the parsed DAG.
    template_fields = ("spec_path", "ds", "report_root", *BatchLLMStageOperator.template_fields)
    ui_color = "#cde6d0"
    component: ClassVar[str] = "plan"

    def __init__(
        self,
        *,
        spec_path: str,
        ds: str = "{{ ds }}",
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise ValueError(f"num_workers is {num_workers!r}; it must be an integer from 1")
        super().__init__(**kwargs)
        self.spec_path = spec_path
        self.ds = ds
        self.num_workers = num_workers
        self.report_root = _report_root(spec_path)

    def check(self) -> None:
        """Refuse more tasks than Airflow maps one over: it would fail only after planning."""
        what, count = f"{self.spec_path}: planner.num_shards", self._spec.planner.num_shards
        if self.num_workers is not None:
            what, count = "num_workers", self.num_workers
        limit = conf.getint("core", "max_map_length", fallback=_MAX_MAP_LENGTH)
        if count is not None and count > limit:
            raise AirflowFailException(
                f"{what} is {count}, but Airflow makes at most {limit} tasks of one ([core]"
                " max_map_length); give the task group fewer num_workers, which share any number of"
                " shards, or raise that setting for the API server, which applies it, and for"
                " workers, which read it here"
            )

    def command(self, context: Context) -> list[str]:
        return ["plan", "--job", self.spec_path, "--ds", self.ds]

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm plan` with the spec itself, and a record for `verify` under the pod's UID."""
        return ["plan", *self._job, "--record", UID_PLACE]

    def verify_command(self, context: Context, pod_uid: str | None) -> list[str] | None:
        return None if pod_uid is None else [*self._job, "--record", pod_uid]

    def work(self) -> str:
        return " ".join(self._job)

    def table_uri(self) -> str:
        return self._spec.output.uri

    def finish(self, context: Context, result: Mapping[str, Any]) -> list[dict[str, str | int]]:
        """Push the plan's URI and counts; see the class."""
        send_stage("plan", context, result)
        plan_uri = str(result["plan_uri"])
        context["ti"].xcom_push(key=PLAN_URI_KEY, value=plan_uri)
        context["ti"].xcom_push(key=SUMMARY_KEY, value=uris_and_counts(result))
        num_shards = int(result["num_shards"])
        if self.num_workers is None and self._spec.planner.num_shards is not None:
            return [{"plan_uri": plan_uri, "shard_idx": index} for index in range(num_shards)]
        num_workers = min(self.num_workers or 1, num_shards)
        return [
            {"plan_uri": plan_uri, "worker": worker, "num_workers": num_workers}
            for worker in range(num_workers)
        ]

    def stem(self) -> str:
        return f"{self._spec.name}-plan"

    def stage_labels(self) -> dict[str, str]:
        return {f"{LABEL}/job": self._spec.name}

    @cached_property
    def _spec(self) -> JobSpec:
        try:
            return load_spec(self.spec_path)
        except SpecError as error:
            raise AirflowFailException(str(error)) from error

    @property
    def _job(self) -> list[str]:
        return ["--job-json", self._spec.model_dump_json(), "--ds", self.ds]


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
