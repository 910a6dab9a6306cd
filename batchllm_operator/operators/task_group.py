"""A job as a task group: plan, generate, commit, report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, BaseOperator, TaskGroup, XComArg
from airflow.sdk.definitions.asset import AssetRef

from batchllm_operator.operators import stages
from batchllm_operator.operators.assets import named_asset, readable_spec
from batchllm_operator.operators.command import BatchLLMReportOperator
from batchllm_operator.operators.jobs.job_operator import Runner
from batchllm_operator.operators.jobs.pod import GpuVendor
from batchllm_operator.operators.planning import NUM_WORKERS_KEY, PLAN_URI_KEY
from batchllm_operator.operators.spark import spark_plan_operator


def batchllm_task_group(
    spec_path: str | Path | XComArg,
    *,
    group_id: str = "batchllm",
    ds: str | XComArg | None = None,
    ds_timezone: str | None = None,
    num_workers: int | str | None = None,
    gpu: GpuVendor | None = None,
    gpu_count: int = 1,
    runner: Runner | None = None,
    env: Mapping[str, str] | None = None,
    lake_conn_id: str | None = None,
    connection_env: Mapping[str, str] | None = None,
    pool: str | None = None,
    input_asset: Asset | str | None = None,
    output_asset: Asset | str | None = None,
    plan_args: Mapping[str, Any] | None = None,
    generate_args: Mapping[str, Any] | None = None,
    commit_args: Mapping[str, Any] | None = None,
    report_args: Mapping[str, Any] | None = None,
) -> TaskGroup:
    """Wire plan -> generate -> commit -> report; call it inside a DAG.

    Plan and generate are repeated, as `plan_2` and `generate_2`, for each further round of a spec
    whose prompts need answers to others. Generate is one task, whatever the number of workers; for
    a plan without shards (all rows are reused, or there is none) it makes no Job. If plan itself is
    skipped, so are all tasks.

    Args:
        spec_path: the job spec, read by the plan task, and for the folder of plans when the DAG is
            parsed. An unreadable spec fails the task, not the DAG. Or the XCom of a task that
            returns the spec's fields as a dictionary, for a job of one round.
        group_id: prefix of the tasks' ids.
        ds: the partition, a template or an XCom (such as that of `one_run_per_partition`); without
            it, and for `ds_timezone`, see `BatchLLMPlanOperator`.
        num_workers: pods that share the plan's shards, at most as many as there are shards; None:
            as `planner.num_shards` in the spec, else one. A template has no such limit, and is
            rendered again while the triggerer watches the Job, which is scaled then.
        gpu: `nvidia` or `amd`: generate runs in pods with `gpu_count` such GPUs each. None: in a
            child process of the Airflow worker, on its hardware.
        runner: where shards are generated, if `gpu` doesn't decide it; see `BatchLLMJobOperator`.
        env: environment of all four commands; see `BatchLLMCommandOperator`, also for
            `lake_conn_id` and `connection_env`, which take credentials from connections.
        pool: Airflow pool of generate, over all runs and DAGs, with a slot for each pod if
            `num_workers` is a number, else one. If it doesn't exist, the task waits forever; if it
            doesn't count deferred tasks (`include_deferred`), it bounds nothing while the triggerer
            watches the Job.
        input_asset: asset that plan reads, or its name; its URI is that of the spec's table then.
        output_asset: so for the asset that commit updates; see `BatchLLMCommitOperator`.
        plan_args: arguments of the plan task that override those above, such as
            `{"runner": "kubernetes"}`, or `{"runner": "spark"}` for `spark_plan_operator`. So are
            `generate_args`, `commit_args` and `report_args` for theirs, such as a namespace.
    """
    everywhere = {"env": env, "lake_conn_id": lake_conn_id, "connection_env": connection_env}
    given = spec_path if isinstance(spec_path, XComArg) else str(spec_path)
    spec = readable_spec(given)
    inlets = _assets(input_asset, spec.input.uri if spec else None)
    outlets = _assets(output_asset, spec.output.uri if spec else None)
    with TaskGroup(group_id=group_id) as group:
        before: BaseOperator | XComArg | None = ds if isinstance(ds, XComArg) else None
        num_rounds = len(spec.rounds) if spec else 1  # one if the spec isn't readable here
        for suffix in ["", *(f"_{number}" for number in range(2, num_rounds + 1))]:
            planning: dict[str, Any] = {"spec_path": given, "ds_timezone": ds_timezone}
            planning |= {"ds": None if ds is None else str(ds)}
            planning |= {"task_id": f"plan{suffix}", "num_workers": num_workers, "inlets": inlets}
            planning |= {**everywhere, **(plan_args or {})}
            is_on_spark = planning.get("runner") == "spark"
            plan = (spark_plan_operator if is_on_spark else stages.BatchLLMPlanOperator)(**planning)
            if before is not None:  # `str(ds)` is a template, which sets no dependency
                before >> plan
            of_plan = {"plan_uri": XComArg(plan, key=PLAN_URI_KEY), **everywhere}
            workers = XComArg(plan, key=NUM_WORKERS_KEY)
            generating: dict[str, Any] = {
                "task_id": f"generate{suffix}",
                **of_plan,
                "num_workers": num_workers if isinstance(num_workers, str) else workers,
                "gpu": gpu,
                "gpu_count": gpu_count,
                "runner": runner,
                **({} if pool is None else {"pool": pool}),
                **(generate_args or {}),
            }
            if pool is not None:
                here = "local" if generating["gpu"] is None else "kubernetes"
                is_in_pods = (generating["runner"] or here) == "kubernetes"
                has_slots = isinstance(num_workers, int) and is_in_pods
                generating.setdefault("pool_slots", num_workers if has_slots else 1)
            generate = before = stages.BatchLLMGenerateOperator(**generating)
        committing = {"task_id": "commit", **of_plan, "outlets": outlets, **(commit_args or {})}
        commit = stages.BatchLLMCommitOperator(**committing)
        report = BatchLLMReportOperator(**{"task_id": "report", **of_plan, **(report_args or {})})
        generate >> commit >> report
    return group


def _assets(given: Asset | str | None, uri: str | None) -> list[Asset | AssetRef]:
    """The asset, if there is one; a name is that of the table at `uri`."""
    if isinstance(given, str):
        return [named_asset(given, uri)]
    return [] if given is None else [given]
