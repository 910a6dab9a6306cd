"""A whole job as one group of tasks: plan, generate every shard, commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import TaskGroup, TriggerRule, XComArg

from batchllm_operator.operators.commit import BatchLLMCommitOperator
from batchllm_operator.operators.generate import BatchLLMGenerateOperator
from batchllm_operator.operators.plan import PLAN_URI_KEY, BatchLLMPlanOperator


def batchllm_task_group(
    spec_path: str | Path,
    *,
    group_id: str = "batchllm",
    ds: str = "{{ ds }}",
    env: Mapping[str, str] | None = None,
    aws_conn_id: str | None = None,
    max_parallel_shards: int | None = None,
    generate_args: Mapping[str, Any] | None = None,
) -> TaskGroup:
    """Wire plan -> generate, mapped over the shards -> commit; call it inside a DAG.

    A plan without shards (an empty partition under `on_empty: commit`) skips generate and
    commits all the same.

    Args:
        spec_path: the job spec; read by the tasks, not when the DAG is parsed.
        group_id: prefix of the tasks' ids.
        ds: the partition, a template.
        env: extra environment of all three commands.
        aws_conn_id: Airflow connection that all three take their AWS credentials from; see
            `BatchLLMCommandOperator`.
        max_parallel_shards: most shards of one run at a time, such as the number of GPUs.
        generate_args: further arguments of the generate tasks, such as a pool or a queue.
    """
    with TaskGroup(group_id=group_id) as group:
        plan = BatchLLMPlanOperator(
            task_id="plan", spec_path=str(spec_path), ds=ds, env=env, aws_conn_id=aws_conn_id
        )
        generate = BatchLLMGenerateOperator.partial(
            task_id="generate",
            env=env,
            aws_conn_id=aws_conn_id,
            max_active_tis_per_dagrun=max_parallel_shards,
            **(generate_args or {}),
        ).expand_kwargs(plan.output)
        commit = BatchLLMCommitOperator(
            task_id="commit",
            plan_uri=XComArg(plan, key=PLAN_URI_KEY),
            env=env,
            aws_conn_id=aws_conn_id,
            trigger_rule=TriggerRule.NONE_FAILED,
        )
        generate >> commit
    return group
