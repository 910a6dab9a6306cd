"""The commands of a job's stages: `plan`, `run`, `commit`, all of them as `job`, and `verify`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.amounts import counted
from batchllm_operator.child_processes import exit_code, start_command
from batchllm_operator.commands import reports
from batchllm_operator.commands.arguments import (
    UsageError,
    add_engine,
    add_job,
    add_only,
    add_plan,
    add_worker,
    is_on_spark,
    load_job,
    plan_uri,
)
from batchllm_operator.commands.replicas import run_replicas
from batchllm_operator.errors import Interrupted
from batchllm_operator.secrets.masking import print_unmasked

if TYPE_CHECKING:
    from batchllm_operator.metrics import MetricsAddress
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

_PREDICTED: Final = ("gpu_s", "cost_usd", "saved_gpu_s", "saved_cost_usd")
_VERIFIED_TOGETHER: Final = (
    *({"plan"}, {"job", "ds"}),  # of a worker
    *({"record", "job", "ds"}, {"record", "job_json", "ds"}),  # of planning
)


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    add_job(command)
    command.add_argument(
        "--record", metavar="NAME", help="keep the result in the output table too, for `verify`"
    )
    add_engine(command)
    add_only(command)
    command.add_argument(
        "--advise",
        action="store_true",
        help="only print what other orders of the template's columns would save, on a sample",
    )


def plan(args: argparse.Namespace) -> Mapping[str, Any]:
    """Plan a job for one partition of its input table."""
    if args.retry is not None:
        from batchllm_operator.plan.plan_job import retry_job

        others = (args.job, args.job_json, args.ds, args.record, args.on, args.only or None)
        if args.advise or any(other is not None for other in others):
            raise UsageError("--retry: goes with no other option")
        return _show_plan(retry_job(args.retry))
    spec = load_job(args, needs_ds=True)
    if args.advise:
        from batchllm_operator.plan.advise import advise, format_advice

        advice = advise(spec, args.ds)
        print(format_advice(advice))
        return asdict(advice)
    from batchllm_operator.plan.plan_job import plan_job

    if is_on_spark(args, spec):
        if args.only:
            raise UsageError("--only: isn't for plans on Spark yet")
        from batchllm_operator.spark.plan_job import plan_on_spark

        planned = plan_on_spark(spec, args.ds)
    else:
        planned = plan_job(spec, args.ds, args.only)
    result = _show_plan(planned)
    if args.record is not None:
        from batchllm_operator.inspect.verify import record_plan

        record_plan(spec, args.ds, args.record, result)
    return result


def _show_plan(planned: StoredPlan) -> dict[str, Any]:
    from batchllm_operator.report import format_plan
    from batchllm_operator.stored_plan.lineage import input_of

    counts, estimate = planned.manifest.counts, planned.manifest.estimate
    print_unmasked(format_plan(planned.manifest, planned.folder.uri))
    return {
        "plan_uri": planned.folder.uri,
        "num_shards": len(planned.manifest.shards),
        "round": planned.manifest.round_idx + 1,
        "num_rounds": len(planned.manifest.spec.rounds),
        "planned_saving_ratio": counts.planned_saving_ratio,
        "optimal_saving_ratio": counts.optimal_saving_ratio,
        "imbalance": planned.manifest.imbalance,
        "num_saved_tokens": counts.num_logical_tokens - counts.num_planned_tokens,
        **{f"predicted_{name}": getattr(estimate, name, None) for name in _PREDICTED},
        **counts.model_dump(),
        "lineage": {"input": input_of(planned.manifest).model_dump()},
    }


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    add_worker(command)
    command.add_argument(
        "--num-gpus",
        type=int,
        metavar="N",
        help="GPUs of this process: engine.replicas times engine.tensor_parallel_size, where the"
        " spec leaves that out",
    )
    command.add_argument(
        "--owner",
        metavar="ID",
        help="what all tries of one task have in common: a worker takes over from its owner's"
        " attempts at once, and never from live ones of others",
    )
    command.add_argument(
        "--drain-s",
        type=float,
        default=0.0,
        metavar="S",
        help="at SIGTERM, finish open parts for at most S seconds (default 0: stop at once);"
        " finished rows are kept",
    )
    command.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, on this machine alone if HOST is left out; 0 for none"
        " (default: BATCHLLM_METRICS_PORT, or none)",
    )
    command.add_argument(  # for the processes of `run_replicas`
        "--replica", type=int, metavar="R", help=argparse.SUPPRESS
    )
    command.add_argument("--meeting", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Generate for a plan's shards until none is left; resumes where it was stopped."""
    args.metrics = _metrics_address(args.metrics_port)
    uri = plan_uri(args)
    from batchllm_operator.metrics import ShardCollector, serving_metrics
    from batchllm_operator.run.draining import Drain
    from batchllm_operator.run.run_shards import replica_environments, run_worker
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    if args.replica is None and (environments := replica_environments(uri, args.num_gpus)):
        return run_replicas(args, uri, environments)
    plan, drain = StoredPlan.open(uri), Drain()
    job, ds = plan.manifest.spec.name, plan.manifest.ds
    collector = ShardCollector(job=job, ds=ds, worker=args.worker)
    with (
        serving_metrics(args.metrics, collector),
        drain.on_sigterm(args.drain_s) if args.drain_s else nullcontext(),
    ):
        report = run_worker(
            plan,
            args.worker,
            args.num_workers,
            num_gpus=args.num_gpus,
            owner=args.owner,
            drain=drain,
            observe=lambda progress: collector.watching(progress.snapshot),
            replica=args.replica,
            meeting_folder=args.meeting,
        )
    return _print_worker({"plan_uri": uri, **report.to_result()})


def _metrics_address(given: str | None) -> MetricsAddress | None:
    """Where to serve metrics, by the command line or else the environment."""
    from batchllm_operator.metrics import ADDRESS_VARIABLE, MetricsAddress

    where, text = "--metrics-port", given
    if text is None:
        where, text = ADDRESS_VARIABLE, os.environ.get(ADDRESS_VARIABLE, "")
    try:
        return MetricsAddress.parse(text.strip())
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _print_worker(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Print a line of counts for a worker's result; returns the result."""
    line = (
        f"worker {result['worker']}: {counted(len(result['shard_idxs']), 'shard')},"
        f" {counted(result['num_rows'], 'row')}, {result['num_failed_rows']:,} failed; of the plan"
        f" {result['num_finished']:,} of {counted(result['num_shards'], 'shard')} finished"
    )
    if others := result["others"]:
        line += f"; other workers run {len(others):,}, the first is shard {others[0]}"
    print(line)
    return result


def add_verify_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command).add_argument(
        "--job-json", metavar="JSON", help="the job spec itself; with --record"
    )
    add_worker(command)
    command.add_argument(
        "--owner",
        metavar="ID",
        help="as for `run`; the counts are those of this owner's shards",
    )
    command.add_argument("--record", metavar="NAME", help="as for `plan`; needs the job and --ds")


def verify(args: argparse.Namespace) -> Mapping[str, Any]:
    """Check that what a stage was to leave in the lake is there, whole."""
    names = ("plan", "record", "ds", "job", "job_json")
    if {name for name in names if getattr(args, name) is not None} not in _VERIFIED_TOGETHER:
        raise UsageError(
            "give --plan, or --job and --ds; or --record with --job or --job-json and --ds"
        )
    from batchllm_operator.inspect.verify import verify_plan, verify_worker

    if args.record is not None:
        return verify_plan(load_job(args), args.ds, args.record)
    uri = plan_uri(args)
    report = verify_worker(uri, args.worker, args.num_workers, args.owner)
    return _print_worker({"plan_uri": uri, **report.to_result()})


def add_commit_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    add_engine(command)
    command.add_argument(
        "--accept",
        action="store_true",
        help="publish even if too many rows failed, or the answers aren't as the spec expects",
    )


def commit(args: argparse.Namespace) -> Mapping[str, Any]:
    """Check that every row is answered, and publish."""
    uri = plan_uri(args)
    from batchllm_operator.commit.commit_run import commit_run
    from batchllm_operator.report import share
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    if is_on_spark(args, StoredPlan.open(uri).manifest.spec):
        from batchllm_operator.spark.commit_run import commit_on_spark

        report = commit_on_spark(uri, accept=args.accept)
    else:
        report = commit_run(uri, accept=args.accept)
    print_unmasked(
        f"published in {report.table_uri}, partition {report.ds}; report: {report.report_uri}"
    )
    num_rows, num_failed = report.plan.num_asked_rows, report.num_failed_rows
    failed = share(num_failed, num_rows)
    answers = f" of {num_rows:,} answers" if report.prompts else ""
    rows = counted(report.num_rows_in, "row")
    print(f"{rows} published, {num_failed:,}{answers} failed ({failed})")
    if num_apart := report.num_quarantined_rows:
        print(f"{num_apart:,} of them at fault, in {report.quarantine_uri}")
    return report.figures()


def add_job_arguments(command: argparse.ArgumentParser) -> None:
    add_job(command)
    add_only(command)


def job(args: argparse.Namespace) -> Mapping[str, Any]:
    """Plan a job, generate for all its shards here, commit and report; resumes.

    One worker generates. Its process ends before the commit, which frees all of the engine's
    memory; `SystemExit` has its exit code if it fails. A job of several rounds is planned again
    after each. The result is that of the report.
    """
    of_plan = argparse.Namespace(**vars(args), on=None, record=None, advise=False)
    planned = plan(of_plan)
    _run_apart(planned["plan_uri"])
    while planned["round"] < planned["num_rounds"]:
        planned = plan(of_plan)
        _run_apart(planned["plan_uri"])
    uri = planned["plan_uri"]
    of_plan = argparse.Namespace(plan=uri, job=None, ds=None, on=None, compare=None, out=None)
    commit(argparse.Namespace(**vars(of_plan), accept=False))
    return {"num_shards": planned["num_shards"], **reports.report(of_plan)}


def _run_apart(uri: str) -> None:
    """`run` in a process of its own; `SystemExit` has its exit code if it fails."""
    process = start_command(["run", "--plan", uri])
    try:
        status = process.wait()
    except Interrupted as stop:
        process.send_signal(stop.signal_number)
        status = process.wait()
    if status:
        raise SystemExit(exit_code(status))
