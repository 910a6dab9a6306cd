"""The task that logs a job's summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context, XComArg

from batchllm_operator.operators.command import BatchLLMCommandOperator, uris_and_counts


class BatchLLMReportOperator(BatchLLMCommandOperator):
    """Logs the summary of a committed plan, and returns the report's URIs and counts.

    Runs `batchllm report`, which writes at most the report's page, if that is missing or outdated.
    If it fails, the partition stays published.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        kwargs: see `BatchLLMCommandOperator`.
    """

    template_fields: Sequence[str] = ("plan_uri", *BatchLLMCommandOperator.template_fields)
    ui_color = "#f1ecc9"

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    def execute(self, context: Context) -> dict[str, str | int | float]:
        return uris_and_counts(self.run_command("report", "--plan", str(self.plan_uri)))
