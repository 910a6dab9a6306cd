"""The task that publishes a job's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from airflow.sdk import Asset, Context

from batchllm_operator.amounts import counted
from batchllm_operator.operators.command import uris_and_counts
from batchllm_operator.operators.jobs.end import EndKind, JobEnd
from batchllm_operator.operators.metrics import send_stage
from batchllm_operator.operators.stage_operator import BatchLLMPlannedOperator

_EVENT_FIELDS: Final = (
    *("ds", "num_rows_in", "num_rows_out", "num_failed_rows", "achieved_saving_ratio"),
    *("plan_uri", "report_uri", "table_uri"),
)


class BatchLLMCommitOperator(BatchLLMPlannedOperator):
    """Checks that every row of a plan is answered and publishes the partition in one step.

    Runs `batchllm commit`, in the worker or, with `runner="kubernetes"`, in the pod of a Job; doing
    so twice is harmless. The return value holds the URIs of the table and of the report, and the
    report's counts.

    Each `Asset` among the task's `outlets` gets an event with the partition (`ds`), the rows
    in, out and failed, the saving ratio and the URIs of plan, report and table. Every success sends
    one, because a task that died after publishing has sent none: two events for one `ds` with the
    same `plan_uri` stand for the same rows. Arguments: `plan_uri`, and see `BatchLLMJobOperator`.
    """

    ui_color = "#e2d5ef"
    component: ClassVar[str] = "commit"

    def command(self, context: Context) -> list[str]:
        return ["commit", *self.plan_arguments]

    def pod_command(self, context: Context, grace_s: int, num_gpus: int) -> list[str]:
        return self.command(context)

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
