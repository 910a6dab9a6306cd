"""The task that generates for a plan's shards until none is left."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from airflow.sdk import Context, XComArg

from batchllm_operator.amounts import counted
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs.end import JobEnd
from batchllm_operator.operators.jobs.pod import (
    DRAIN_MARGIN_S,
    INDEX,
    check_grace,
    check_grace_of_templates,
)
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.stage_operator import BatchLLMPlannedOperator, number_of_workers


class BatchLLMGenerateOperator(BatchLLMPlannedOperator):
    """Generates the outputs of a plan's shards; finished parts are skipped.

    Runs `batchllm run` in the Airflow worker, or in the pods of one Indexed Job, each of which is a
    worker that takes shards until none is left. The return value holds the plan's URI and the
    counts of the shards that the task has finished.

    The task succeeds when each shard of the plan is finished, whatever its pods did.

    Args:
        num_workers: pods of the Job (templated). It may change while the Job runs: when a deferred
            task looks at the lake, or a task is tried again, it scales the Job, unless that has a
            `queue_name`. 0 for a plan without shards. In the Airflow worker there is one worker,
            whatever the number.
        look_interval: how often the task looks whether the plan is whole, and otherwise, without a
            queue, removes waiting pods for which nothing is left, until something is again.
        kwargs: `plan_uri`, and see `BatchLLMJobOperator`.

    Raises:
        ValueError: an argument or the pod template leaves no time to finish open parts.
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
        if self.termination_grace_period is None:  # it would win
            check_grace_of_templates(self)

    def check(self) -> None:
        self.num_pods()

    def num_pods(self) -> int:
        return number_of_workers(self.num_workers)

    def command(self, context: Context) -> list[str]:
        num_gpus = self.gpu_count if self.gpu is not None else 0
        return self._run_command(self._attempt(context).owner, num_gpus)

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm run` with the pod's GPUs; open parts may finish within the grace period."""
        check_grace("the pod's grace period", grace_s)  # of a template file
        # By its owner a pod takes up at once what the one before it of its index has left.
        command = self._run_command(f"{self._attempt(context).owner}/{INDEX}", num_gpus)
        share = ["--worker", INDEX, "--num-workers", str(self.num_pods())]
        return [*command, *share, "--drain-s", str(grace_s - DRAIN_MARGIN_S)]

    def _run_command(self, owner: str, num_gpus: int) -> list[str]:
        gpus = ["--num-gpus", str(num_gpus)] if num_gpus else []
        return ["run", *self.plan_arguments, "--owner", owner, *gpus]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The counts of this task's shards if the whole plan is finished."""
        owner = ["--owner", self._attempt(context).owner]
        result = self.run_verify(*self.plan_arguments, *owner)
        return result if isinstance(result, str) or _is_whole(result) else _unfinished(result)

    def look(self, context: Context, end: JobEnd) -> bool:
        """Whether the plan is whole; scales the Job if `num_workers` or what is left has changed.

        A Job in a queue isn't scaled: Kueue would stop all of its pods, and queue it again. Shards
        are judged by their reports: the parts are checked once, at the end.
        """
        num_pods = self.num_pods()
        share = ["--worker", "0", "--num-workers", str(max(1, num_pods))]
        result = self.run_verify(*self.plan_arguments, *share)
        if not isinstance(result, str) and _is_whole(result):
            return True
        is_free = isinstance(result, str)
        self.log.info("In the lake: %s", result if isinstance(result, str) else _unfinished(result))
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


def _is_whole(result: Mapping[str, Any]) -> bool:
    return bool(result["num_finished"] == result["num_shards"])


def _unfinished(result: Mapping[str, Any]) -> str:
    total = counted(result["num_shards"], "shard")
    return f"{result['num_finished']:,} of {total} finished, and workers run the rest"
