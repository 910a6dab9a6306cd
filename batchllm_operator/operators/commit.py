"""The task that publishes a job's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context, XComArg

from batchllm_operator.operators.command import BatchLLMCommandOperator, uris_and_counts


class BatchLLMCommitOperator(BatchLLMCommandOperator):
    """Checks that every row of a plan is answered and publishes the partition in one step.

    Runs `batchllm commit`; doing so twice is harmless. The return value holds the URIs of
    the table and of the report, and the report's counts.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        kwargs: see `BatchLLMCommandOperator`.
    """

    template_fields: Sequence[str] = ("plan_uri", "env", "aws_conn_id")
    ui_color = "#e2d5ef"

    def __init__(self, *, plan_uri: str | XComArg, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri

    def execute(self, context: Context) -> dict[str, str | int | float]:
        """Publish; see `run_command` for the errors."""
        return uris_and_counts(self.run_command("commit", "--plan", str(self.plan_uri)))
