"""The task that generates one shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context, XComArg

from batchllm_operator.operators.command import BatchLLMCommandOperator, uris_and_counts


class BatchLLMGenerateOperator(BatchLLMCommandOperator):
    """Generates the outputs of one shard of a plan; what was finished before is skipped.

    Runs `batchllm run`. The return value holds the plan's URI and the shard's counts.

    Args:
        plan_uri: the plan: a URI (templated) or the XCom that holds it.
        shard_idx: which shard of it, from 0 (templated).
        kwargs: see `BatchLLMCommandOperator`.
    """

    template_fields: Sequence[str] = ("plan_uri", "shard_idx", "env", "aws_conn_id")
    ui_color = "#f4dfc8"

    def __init__(self, *, plan_uri: str | XComArg, shard_idx: int | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_uri = plan_uri
        self.shard_idx = shard_idx

    def execute(self, context: Context) -> dict[str, str | int | float]:
        """Generate; see `run_command` for the errors."""
        result = self.run_command(
            "run", "--plan", str(self.plan_uri), "--shard", str(self.shard_idx)
        )
        return uris_and_counts(result)
