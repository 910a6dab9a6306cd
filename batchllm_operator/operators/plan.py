"""The task that plans a job for one partition, in the worker or in a pod."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.sdk import Context

from batchllm_operator.operators.jobs.end import JobEnd
from batchllm_operator.operators.jobs.owner import LABEL
from batchllm_operator.operators.jobs.pod import JOB_UID
from batchllm_operator.operators.planning import Planning
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator


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
        return self._commands().verify(*self.job_arguments, "--record", end.uid)

    def stem(self) -> str:
        return f"{self.spec.name}-plan"

    def stage_labels(self) -> dict[str, str]:
        return {f"{LABEL}/job": self.spec.name}
