"""The task that publishes a job's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from airflow.sdk import Asset, Context, XComArg

from batchllm_operator.amounts import counted
from batchllm_operator.operators.command import BatchLLMCommandOperator, uris_and_counts
from batchllm_operator.operators.metrics import send_stage

_EVENT_FIELDS: Final = (
    *("ds", "num_rows_in", "num_rows_out", "num_failed_rows", "achieved_saving_ratio"),
    *("plan_uri", "report_uri", "table_uri"),
)


class BatchLLMCommitOperator(BatchLLMCommandOperator):
    """Checks that every row of a plan is answered and publishes the partition in one step.

    Runs `batchllm commit`; doing so twice is harmless. The return value holds the URIs of
    the table and of the report, and the report's counts.

    Each `Asset` among the task's `outlets` gets an event with the partition (`ds`), the rows
    in, out and failed, the saving ratio and the URIs of plan, report and table. Every success sends
    one, even if nothing had to be done, because a task that died after publishing has sent none.
    Two events for one `ds` with the same `plan_uri` stand for the same rows.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        kwargs: see `BatchLLMCommandOperator`; `outlets` is Airflow's.
    """

    template_fields: Sequence[str] = ("plan_uri", *BatchLLMCommandOperator.template_fields)
    ui_color = "#e2d5ef"

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    def execute(self, context: Context) -> dict[str, str | int | float]:
        result = self.run_command("commit", "--plan", str(self.plan_uri))
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
