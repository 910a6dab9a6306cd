"""A job as a task group: plan, generate by workers, commit, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import Asset, TaskGroup, TriggerRule, XComArg

from batchllm_operator.operators.commit import BatchLLMCommitOperator
from batchllm_operator.operators.generate import BatchLLMGenerateOperator
from batchllm_operator.operators.plan import BatchLLMPlanOperator
from batchllm_operator.operators.planning import PLAN_URI_KEY
from batchllm_operator.operators.pods.pod_operator import Runner
from batchllm_operator.operators.pods.settings import GpuVendor
from batchllm_operator.operators.report import BatchLLMReportOperator
from batchllm_operator.operators.spark.planning import spark_plan_operator


def batchllm_task_group(
    spec_path: str | Path,
    *,
    group_id: str = "batchllm",
    ds: str | XComArg = "{{ ds }}",
    num_workers: int | None = None,
    gpu: GpuVendor | None = None,
    gpu_count: int = 1,
    runner: Runner | None = None,
    env: Mapping[str, str] | None = None,
    aws_conn_id: str | None = None,
    connection_env: Mapping[str, str] | None = None,
    pool: str | None = None,
    max_parallel_shards: int | None = None,
    output_asset: Asset | str | None = None,
    plan_args: Mapping[str, Any] | None = None,
    generate_args: Mapping[str, Any] | None = None,
) -> TaskGroup:
    """Wire plan -> generate, mapped -> commit -> report; call it inside a DAG.

    Generate is mapped over workers, each of which takes shards until none is left.

    A plan without shards (an empty partition under `on_empty: commit`, or one whose rows are all
    reused) skips generate, but commits. If plan itself is skipped, so are all tasks.

    Args:
        spec_path: the job spec; read by the plan task when it runs, and for the folder of plans
            when the DAG is parsed. An unreadable spec fails the task, not the DAG.
        group_id: prefix of the tasks' ids.
        ds: the partition, a template or an XCom (such as that of `one_run_per_partition`).
        num_workers: workers that share the plan's shards, at most as many as there are shards. If
            one fails for good, and others do its work, commit still runs (after the task `ended`).
            Another run of the same plan, or one that is cleared, may have another number. None: a
            worker for each shard if the spec says how many (`planner.num_shards`), else one worker.
        gpu: `nvidia` or `amd`: generate tasks run in pods with such GPUs. None: in child processes
            of the Airflow worker, on its hardware.
        gpu_count: GPUs of a pod.
        runner: where shards are generated, if `gpu` doesn't decide it; see `BatchLLMPodOperator`.
        env: extra environment of all four commands.
        aws_conn_id: Airflow connection that all four take their AWS credentials from; see
            `BatchLLMCommandOperator`.
        connection_env: further variables from connections for all four; see there, too.
        pool: Airflow pool of the generate tasks, with a slot per running worker, over
            all runs and DAGs. If it doesn't exist, they wait forever; if it doesn't count deferred
            tasks (`include_deferred`), it bounds nothing while the triggerer watches the pods.
        max_parallel_shards: upper bound of concurrent workers of one run.
        output_asset: asset, or its URI, that commit updates; see `BatchLLMCommitOperator` for
            the events.
        plan_args: further arguments of the plan task, such as `{"runner": "kubernetes"}`. With
            `{"runner": "spark"}` it plans on Spark; see `spark_plan_operator` for the operator.
        generate_args: further arguments of the generate tasks, such as a namespace.

    Raises:
        ValueError: there is no such `gpu`, `gpu_count` or `num_workers` isn't positive, or a task
            refuses another argument.
    """
    everywhere = {"env": env, "aws_conn_id": aws_conn_id, "connection_env": connection_env}
    pool_args = {} if pool is None else {"pool": pool}
    asset = Asset(output_asset) if isinstance(output_asset, str) else output_asset
    with TaskGroup(group_id=group_id) as group:
        plan = _plan_task(
            {
                "task_id": "plan",
                "spec_path": str(spec_path),
                "ds": str(ds),
                "num_workers": num_workers,
                **everywhere,
                **(plan_args or {}),
            }
        )
        if isinstance(ds, XComArg):  # `str(ds)` is a template, which sets no dependency
            ds >> plan
        plan_uri = XComArg(plan, key=PLAN_URI_KEY)
        generate = BatchLLMGenerateOperator.partial(
            task_id="generate",
            gpu=gpu,
            gpu_count=gpu_count,
            runner=runner,
            max_active_tis_per_dagrun=max_parallel_shards,
            **everywhere,
            **pool_args,
            **(generate_args or {}),
        ).expand_kwargs(plan.output)
        # The job ends when its shards are done, and others may have done those of a worker that
        # failed. Commit refuses if not, and needs a plan that succeeded.
        ended = EmptyOperator(task_id="ended", trigger_rule=TriggerRule.ALL_DONE)
        commit = BatchLLMCommitOperator(
            task_id="commit",
            plan_uri=plan_uri,
            outlets=[] if asset is None else [asset],
            **everywhere,
        )
        report = BatchLLMReportOperator(task_id="report", plan_uri=plan_uri, **everywhere)
        generate >> ended >> commit >> report
    return group


def _plan_task(arguments: dict[str, Any]) -> Any:
    if arguments.get("runner") != "spark":
        return BatchLLMPlanOperator(**arguments)
    return spark_plan_operator(**{n: each for n, each in arguments.items() if n != "runner"})
