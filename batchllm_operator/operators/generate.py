"""The task that generates for a plan's shards until none is left."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context, XComArg

from batchllm_operator.amounts import counted
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs.end import JobEnd
from batchllm_operator.operators.jobs.job_request import check_grace_of_templates
from batchllm_operator.operators.jobs.owner import LABEL, job_of
from batchllm_operator.operators.jobs.pod import DRAIN_MARGIN_S, INDEX, check_grace
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator


class BatchLLMGenerateOperator(BatchLLMStageOperator):
    """Generates the outputs of a plan's shards; finished parts are skipped.

    Runs `batchllm run` in the Airflow worker, or in the pods of one Indexed Job, each of which is a
    worker that takes shards until none is left. The return value holds the plan's URI and the
    counts of the shards that the task has finished.

    The task succeeds when each shard of the plan is finished, whatever its pods did.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        num_workers: pods of the Job (templated). It may change while the Job runs: when a deferred
            task looks at the lake, or a task is tried again, it scales the Job, unless that has a
            `queue_name`. 0 for a plan without shards. In the Airflow worker there is one worker,
            whatever the number.
        look_interval: how often the task looks whether the plan is whole, and otherwise, without a
            queue, removes waiting pods for which nothing is left.
        kwargs: see `BatchLLMJobOperator`.

    Raises:
        ValueError: an argument or the pod template leaves no time to finish open parts.
    """

    template_fields = ("plan_uri", "num_workers", *BatchLLMStageOperator.template_fields)
    ui_color = "#f4dfc8"
    component: ClassVar[str] = "run"

    def __init__(
        self,
        *,
        plan_uri: str | XComArg,
        num_workers: int | str | XComArg = 1,
        look_interval: timedelta = timedelta(minutes=5),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.plan_uri, self.num_workers = plan_uri, num_workers
        self.look_interval = look_interval
        if self.settings.grace_s is None:  # it would win
            check_grace_of_templates(self)

    def check(self) -> None:
        self.num_pods()

    def num_pods(self) -> int:
        try:
            return max(0, int(str(self.num_workers)))
        except ValueError:
            raise AirflowFailException(
                f"num_workers is {self.num_workers!r}; it must be an integer from 1"
            ) from None

    def command(self, context: Context) -> list[str]:
        num_gpus = self.gpu_count if self.gpu is not None else 0
        return self._run_command(self._attempt(context).owner, num_gpus)

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm run` with the pod's GPUs; open parts may finish within the grace period.

        Raises:
            ValueError: it is too short for that.
        """
        check_grace("the pod's grace period", grace_s)  # of a template file
        # By its owner a pod takes up at once what the one before it of its index has left.
        command = self._run_command(f"{self._attempt(context).owner}/{INDEX}", num_gpus)
        share = ["--worker", INDEX, "--num-workers", str(self.num_pods())]
        return [*command, *share, "--drain-s", str(grace_s - DRAIN_MARGIN_S)]

    def verified(self, context: Context, end: JobEnd | None) -> dict[str, Any] | str:
        """The counts of this task's shards if the whole plan is finished."""
        owner = ["--owner", self._attempt(context).owner]
        result = self._commands().verify("--plan", str(self.plan_uri), *owner)
        return result if isinstance(result, str) or _is_whole(result) else _unfinished(result)

    def look(self, context: Context, end: JobEnd) -> bool:
        """Whether the plan is whole; scales the Job if `num_workers` or what is left has changed.

        A Job in a queue isn't scaled: Kueue would stop all of its pods, and queue it again. This
        task's live workers count as others', and most shards are judged by their reports: the
        parts are checked once, at the end.
        """
        num_pods = self.num_pods()
        share = ["--worker", "0", "--num-workers", str(max(1, num_pods))]
        result = self._commands().verify("--plan", str(self.plan_uri), *share)
        if not isinstance(result, str) and _is_whole(result):
            return True
        is_elastic = self.queue_name is None
        if is_elastic and num_pods != end.num_pods > 0:
            self.log.info("Scaling the Job from %d to %d workers", end.num_pods, num_pods)
            self.scale(num_pods, num_pods)
        elif isinstance(result, str):
            self.log.info("In the lake: %s", result)
        elif is_elastic and 0 < end.num_running < end.num_running + end.num_waiting:
            self.log.info(
                "Nothing is left for %s: %s",
                counted(end.num_waiting, "waiting pod"),
                _unfinished(result),
            )
            self.scale(end.num_running)
        return False

    def work(self) -> str:
        """Without the number of workers: a Job that was made for another does the same work."""
        return f"--plan {self.plan_uri}"

    def table_uri(self) -> str:
        """The folder of plans: the output table's, if the job has no staging folder."""
        return str(self.plan_uri).partition("/_batchllm/")[0]

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        send_stage("generate", context, result)
        return uris_and_counts(result)

    def stem(self) -> str:
        return job_of(str(self.plan_uri))

    def stage_labels(self) -> dict[str, str]:
        plan = str(self.plan_uri).rstrip("/").rsplit("/", 1)[-1]
        return {f"{LABEL}/job": job_of(str(self.plan_uri)), f"{LABEL}/plan": plan}

    def _run_command(self, owner: str, num_gpus: int) -> list[str]:
        gpus = ["--num-gpus", str(num_gpus)] if num_gpus else []
        return ["run", "--plan", str(self.plan_uri), "--owner", owner, *gpus]


def _is_whole(result: Mapping[str, Any]) -> bool:
    return bool(result["num_finished"] == result["num_shards"])


def _unfinished(result: Mapping[str, Any]) -> str:
    total = counted(result["num_shards"], "shard")
    return f"{result['num_finished']:,} of {total} finished, and workers run the rest"
