"""The command `batchllm run`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchllm_operator.amounts import counted
from batchllm_operator.commands.arguments import (
    UsageError,
    add_plan,
    add_worker,
    check_worker,
    plan_uri,
)
from batchllm_operator.commands.replicas import run_replicas

if TYPE_CHECKING:
    from batchllm_operator.metrics import MetricsAddress


def add_arguments(command: argparse.ArgumentParser) -> None:
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
    check_worker(args)
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
    result = {"plan_uri": uri, **report.to_result()}
    print(format_worker(result))
    return result


def format_worker(result: Mapping[str, Any]) -> str:
    """A line of counts for a worker's result."""
    line = (
        f"worker {result['worker']}: {counted(len(result['shard_idxs']), 'shard')},"
        f" {counted(result['num_rows'], 'row')}, {result['num_failed_rows']:,} failed; of the plan"
        f" {result['num_finished']:,} of {counted(result['num_shards'], 'shard')} finished"
    )
    if others := result["others"]:
        line += f"; other workers run {len(others):,}, the first is shard {others[0]}"
    return line


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
