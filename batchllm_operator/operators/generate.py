"""The task that generates for a plan's shards until none is left."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from airflow.sdk import Context, XComArg

from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.pods.owner import LABEL
from batchllm_operator.operators.pods.settings import (
    DRAIN_MARGIN_S,
    PodSettings,
    check_grace,
    check_grace_of_template,
)
from batchllm_operator.operators.stage_operator import BatchLLMStageOperator


class BatchLLMGenerateOperator(BatchLLMStageOperator):
    """Generates the outputs of a plan's shards; finished parts are skipped.

    Runs `batchllm run` in the Airflow worker or in a pod with GPUs, as a worker that takes shards
    until none is left. The return value holds the plan's URI and the counts of the shards that it
    has finished.

    The task succeeds when each shard of the plan is finished or being run by others, whether or not
    its own pod has run. What one of its earlier tries or pods was running doesn't count as being
    run. Several tasks of one plan need not agree on the number of workers.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        worker: which worker, from 0 (templated); its number says which shards it takes first.
        num_workers: of how many (templated).
        look_interval: how long a worker's pod may give no sign until the task looks whether
            anything is left for it, and otherwise removes it; a sixth as often while it gives some.
        kwargs: see `BatchLLMPodOperator`.

    Raises:
        ValueError: an argument or the pod template leaves no time to finish open parts.
    """

    template_fields = ("plan_uri", "worker", "num_workers", *BatchLLMStageOperator.template_fields)
    ui_color = "#f4dfc8"
    component: ClassVar[str] = "run"

    def __init__(
        self,
        *,
        plan_uri: str | XComArg,
        worker: int | str = 0,
        num_workers: int | str = 1,
        look_interval: timedelta = timedelta(minutes=5),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri
        self.worker, self.num_workers = worker, num_workers
        self.look_interval = look_interval

    @classmethod
    def _check_settings(cls, settings: PodSettings, *templates: Any) -> None:
        if settings.grace_s is None:  # it would win
            check_grace_of_template(*templates)

    def command(self, context: Context) -> list[str]:
        return self._run_command(context, self.gpu_count if self.gpu is not None else 0)

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm run` with the pod's GPUs; open parts may finish within the grace period.

        Raises:
            ValueError: it is too short for that.
        """
        check_grace("the pod's grace period", grace_s)  # of a template file
        drain_s = grace_s - DRAIN_MARGIN_S
        return [*self._run_command(context, num_gpus), "--drain-s", str(drain_s)]

    def verify_command(self, context: Context, pod_uid: str | None) -> list[str]:
        return [*self._share(), *self._owner(context)]

    def work(self) -> str:
        """Without the number of workers: a pod that was made for another does the same work."""
        return f"--plan {self.plan_uri} --worker {self.worker}"

    def table_uri(self) -> str:
        """The folder of plans: the output table's, if the job has no staging folder."""
        return str(self.plan_uri).partition("/_batchllm/")[0]

    def is_all_done(self, result: Mapping[str, Any]) -> bool:
        return bool(result["num_finished"] == result["num_shards"])

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        send_stage("generate", context, result)
        return uris_and_counts(result)

    def stem(self) -> str:
        return f"{self._job}-{self.worker}"

    def stage_labels(self) -> dict[str, str]:
        return {
            f"{LABEL}/job": self._job,
            f"{LABEL}/plan": str(self.plan_uri).rstrip("/").rsplit("/", 1)[-1],
            f"{LABEL}/worker": str(self.worker),
        }

    @property
    def _job(self) -> str:
        """From the plan's URI, .../<job>/<ds>/plan-<id>."""
        return ("", "", *str(self.plan_uri).rstrip("/").split("/"))[-3] or "job"

    def _run_command(self, context: Context, num_gpus: int) -> list[str]:
        gpus = ["--num-gpus", str(num_gpus)] if num_gpus else []
        return ["run", *self._share(), *self._owner(context), *gpus]

    def _owner(self, context: Context) -> list[str]:
        return ["--owner", self._attempt(context).owner]

    def _share(self) -> list[str]:
        worker = ["--worker", str(self.worker), "--num-workers", str(self.num_workers)]
        return ["--plan", str(self.plan_uri), *worker]
