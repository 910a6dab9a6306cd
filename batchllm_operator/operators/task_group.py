"""A job as a task group: plan, generate, commit, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, TaskGroup, XComArg

from batchllm_operator.operators.command import BatchLLMReportOperator
from batchllm_operator.operators.commit import BatchLLMCommitOperator
from batchllm_operator.operators.generate import BatchLLMGenerateOperator
from batchllm_operator.operators.jobs.job_operator import Runner
from batchllm_operator.operators.jobs.pod import GpuVendor
from batchllm_operator.operators.planning import (
    NUM_WORKERS_KEY,
    PLAN_URI_KEY,
    BatchLLMPlanOperator,
)
from batchllm_operator.operators.spark import spark_plan_operator


def batchllm_task_group(
    spec_path: str | Path,
    *,
    group_id: str = "batchllm",
    ds: str | XComArg = "{{ ds }}",
    num_workers: int | str | None = None,
    gpu: GpuVendor | None = None,
    gpu_count: int = 1,
    runner: Runner | None = None,
    env: Mapping[str, str] | None = None,
    aws_conn_id: str | None = None,
    connection_env: Mapping[str, str] | None = None,
    pool: str | None = None,
    output_asset: Asset | str | None = None,
    plan_args: Mapping[str, Any] | None = None,
    generate_args: Mapping[str, Any] | None = None,
    commit_args: Mapping[str, Any] | None = None,
    report_args: Mapping[str, Any] | None = None,
) -> TaskGroup:
    """Wire plan -> generate -> commit -> report; call it inside a DAG.

    Generate is one task, whatever the number of workers. For a plan without shards (an empty
    partition under `on_empty: commit`, or one whose rows are all reused) it makes no Job. If plan
    itself is skipped, so are all tasks.

    Args:
        spec_path: the job spec; read by the plan task when it runs, and for the folder of plans
            when the DAG is parsed. An unreadable spec fails the task, not the DAG.
        group_id: prefix of the tasks' ids.
        ds: the partition, a template or an XCom (such as that of `one_run_per_partition`).
        num_workers: pods that share the plan's shards, at most as many as there are shards. A
            template has no such limit, and is rendered again while the triggerer watches the Job,
            which is scaled then. None: a worker for each shard if the spec says how many
            (`planner.num_shards`), else one worker.
        gpu: `nvidia` or `amd`: generate runs in pods with such GPUs. None: in a child process of
            the Airflow worker, on its hardware.
        gpu_count: GPUs of a pod.
        runner: where shards are generated, if `gpu` doesn't decide it; see `BatchLLMJobOperator`.
        env: environment of all four commands; see `BatchLLMCommandOperator`, also for `aws_conn_id`
            and `connection_env`, which take credentials from connections.
        pool: Airflow pool of generate, over all runs and DAGs, with a slot for each pod if
            `num_workers` is a number, else one. If it doesn't exist, the task waits forever; if it
            doesn't count deferred tasks (`include_deferred`), it bounds nothing while the triggerer
            watches the Job.
        output_asset: asset, or its URI, that commit updates; see `BatchLLMCommitOperator`.
        plan_args: arguments of the plan task that override those above, such as
            `{"runner": "kubernetes"}`, or `{"runner": "spark"}` for `spark_plan_operator`. So are
            `generate_args`, `commit_args` and `report_args` for theirs, such as a namespace.

    Raises:
        ValueError: a task refuses an argument.
    """
    everywhere = {"env": env, "aws_conn_id": aws_conn_id, "connection_env": connection_env}
    with TaskGroup(group_id=group_id) as group:
        planning = {"spec_path": str(spec_path), "ds": str(ds), "num_workers": num_workers}
        plan = _plan_task({"task_id": "plan", **planning, **everywhere, **(plan_args or {})})
        if isinstance(ds, XComArg):  # `str(ds)` is a template, which sets no dependency
            ds >> plan
        of_plan: dict[str, Any] = {"plan_uri": XComArg(plan, key=PLAN_URI_KEY), **everywhere}
        is_template = isinstance(num_workers, str)
        generating: dict[str, Any] = {
            "task_id": "generate",
            **of_plan,
            "num_workers": num_workers if is_template else XComArg(plan, key=NUM_WORKERS_KEY),
            "gpu": gpu,
            "gpu_count": gpu_count,
            "runner": runner,
            **({} if pool is None else {"pool": pool}),
            **(generate_args or {}),
        }
        if pool is not None:
            is_in_pods = generating["runner"] == "kubernetes" or (
                generating["runner"] is None and generating["gpu"] is not None
            )
            has_slots = isinstance(num_workers, int) and is_in_pods
            generating.setdefault("pool_slots", num_workers if has_slots else 1)
        asset = Asset(output_asset) if isinstance(output_asset, str) else output_asset
        outlets = {"outlets": [] if asset is None else [asset]}
        generate = BatchLLMGenerateOperator(**generating)
        committing = {"task_id": "commit", **of_plan, **outlets, **(commit_args or {})}
        commit = BatchLLMCommitOperator(**committing)
        report = BatchLLMReportOperator(**{"task_id": "report", **of_plan, **(report_args or {})})
        generate >> commit >> report
    return group


def _plan_task(arguments: dict[str, Any]) -> Any:
    if arguments.get("runner") != "spark":
        return BatchLLMPlanOperator(**arguments)
    return spark_plan_operator(**{n: value for n, value in arguments.items() if n != "runner"})
