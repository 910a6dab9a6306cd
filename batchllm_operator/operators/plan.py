"""The task that plans a job for one partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from airflow.sdk import Context

from batchllm_operator.operators.command import BatchLLMCommandOperator, uris_and_counts

PLAN_URI_KEY: Final = "plan_uri"
SUMMARY_KEY: Final = "plan"


class BatchLLMPlanOperator(BatchLLMCommandOperator):
    """Reads a partition, plans what its prompts share, and cuts the work into shards.

    Runs `batchllm plan`. Planning the same partition again gives the same plan.

    XComs: the return value is one `{"plan_uri": ..., "shard_idx": ...}` per shard, for
    `BatchLLMGenerateOperator.partial(...).expand_kwargs(plan.output)` (Airflow maps over
    return values only; the list is empty for a partition without rows). `plan_uri` is the
    plan's URI, `plan` the URI and all counts.

    Args:
        spec_path: the job spec, a YAML file that the worker can read (templated).
        ds: the partition (templated); by default the run's logical date.
        kwargs: see `BatchLLMCommandOperator`.
    """

    template_fields: Sequence[str] = ("spec_path", "ds", "env", "aws_conn_id")
    ui_color = "#cde6d0"

    def __init__(self, *, spec_path: str, ds: str = "{{ ds }}", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec_path = spec_path
        self.ds = ds

    def execute(self, context: Context) -> list[dict[str, str | int]]:
        """Plan; see the class for the XComs and `run_command` for the errors."""
        result = self.run_command("plan", "--job", self.spec_path, "--ds", self.ds)
        plan_uri = str(result["plan_uri"])
        context["ti"].xcom_push(key=PLAN_URI_KEY, value=plan_uri)
        context["ti"].xcom_push(key=SUMMARY_KEY, value=uris_and_counts(result))
        return [
            {"plan_uri": plan_uri, "shard_idx": shard_idx}
            for shard_idx in range(int(result["num_shards"]))
        ]
