"""The task that generates one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from airflow.sdk import Context, XComArg

from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.pods.owner import LABEL
from batchllm_operator.operators.pods.settings import DRAIN_MARGIN_S
from batchllm_operator.operators.stage import BatchLLMStageOperator


class BatchLLMGenerateOperator(BatchLLMStageOperator):
    """Generates the outputs of one shard of a plan; finished parts are skipped.

    Runs `batchllm run` in the worker or in a pod with GPUs. The task succeeds when the
    shard's report and all its parts are in the lake. The return value holds the plan's URI
    and the shard's counts.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        shard_idx: which shard of it, from 0 (templated).
        kwargs: see `BatchLLMPodOperator`.
    """

    template_fields = ("plan_uri", "shard_idx", *BatchLLMStageOperator.template_fields)
    ui_color = "#f4dfc8"
    component: ClassVar[str] = "run"

    def __init__(self, *, plan_uri: str | XComArg, shard_idx: int | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri
        self.shard_idx = shard_idx

    def command(self, context: Context) -> list[str]:
        return self._run_command(context, self.gpu_count if self.gpu is not None else 0)

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        """`batchllm run` with the pod's GPUs; open parts may finish within the grace period."""
        drain_s = max(0, grace_s - DRAIN_MARGIN_S)
        return [*self._run_command(context, num_gpus), "--drain-s", str(drain_s)]

    def verify_command(self, pod_uid: str | None) -> list[str]:
        return self._shard()

    def work(self) -> str:
        return " ".join(self._shard())

    def table_uri(self) -> str:
        """The folder of plans: the output table's, if the job has no staging folder."""
        return str(self.plan_uri).partition("/_batchllm/")[0]

    def finish(self, context: Context, result: Mapping[str, Any]) -> dict[str, str | int | float]:
        send_stage("generate", context, result)
        return uris_and_counts(result)

    def stem(self) -> str:
        return f"{self._job}-{self.shard_idx}"

    def stage_labels(self) -> dict[str, str]:
        return {
            f"{LABEL}/job": self._job,
            f"{LABEL}/plan": str(self.plan_uri).rstrip("/").rsplit("/", 1)[-1],
            f"{LABEL}/shard": str(self.shard_idx),
        }

    @property
    def _job(self) -> str:
        """From the plan's URI, .../<job>/<ds>/plan-<id>."""
        return ("", "", *str(self.plan_uri).rstrip("/").split("/"))[-3] or "job"

    def _run_command(self, context: Context, num_gpus: int) -> list[str]:
        owner = ["--owner", self._attempt(context).owner]
        gpus = ["--num-gpus", str(num_gpus)] if num_gpus else []
        return ["run", *self._shard(), *owner, *gpus]

    def _shard(self) -> list[str]:
        return ["--plan", str(self.plan_uri), "--shard", str(self.shard_idx)]
