"""The command `batchllm plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from batchllm_operator.commands.arguments import add_engine, add_job_and_ds, is_on_spark, load_job
from batchllm_operator.secrets.masking import print_unmasked


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_job_and_ds(command)
    command.add_argument(
        "--record", metavar="NAME", help="keep the result in the output table too, for `verify`"
    )
    add_engine(command)
    command.add_argument(
        "--advise",
        action="store_true",
        help="only print what other orders of the template's columns would save, on a sample",
    )


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    spec = load_job(args, needs_ds=True)
    if args.advise:
        from batchllm_operator.plan.advise import advise, format_advice

        advice = advise(spec, args.ds)
        print(format_advice(advice))
        return asdict(advice)
    from batchllm_operator.plan.plan_job import plan_job
    from batchllm_operator.report import format_plan

    if is_on_spark(args, spec):
        from batchllm_operator.spark.plan_job import plan_on_spark

        plan = plan_on_spark(spec, args.ds)
    else:
        plan = plan_job(spec, args.ds)
    counts, estimate = plan.manifest.counts, plan.manifest.estimate
    print_unmasked(format_plan(plan.manifest, plan.folder.uri))
    result = {
        "plan_uri": plan.folder.uri,
        "num_shards": len(plan.manifest.shards),
        "planned_saving_ratio": counts.planned_saving_ratio,
        "optimal_saving_ratio": counts.optimal_saving_ratio,
        "imbalance": plan.manifest.imbalance,
        "predicted_gpu_s": estimate.gpu_s if estimate else None,
        "predicted_cost_usd": estimate.cost_usd if estimate else None,
        "num_saved_tokens": counts.num_logical_tokens - counts.num_planned_tokens,
        "predicted_saved_gpu_s": estimate.saved_gpu_s if estimate else None,
        "predicted_saved_cost_usd": estimate.saved_cost_usd if estimate else None,
        **counts.model_dump(),
    }
    if args.record is not None:
        from batchllm_operator.inspect.verify import record_plan

        record_plan(spec, args.ds, args.record, result)
    return result
