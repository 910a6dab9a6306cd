"""The command `batchllm run`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from batchllm_operator.commands.arguments import add_plan, check_plan, plan_uri

if TYPE_CHECKING:
    from batchllm_operator.metrics import MetricsAddress
    from batchllm_operator.run.shard_tally import ShardTally


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    command.add_argument("--shard", required=True, type=int, metavar="I", help="shard, from 0")
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
        help="what all tries of one task have in common: while an attempt of another owner, or by"
        " hand, is at work on the shard, end with exit code 7 at once instead of taking over",
    )
    command.add_argument(
        "--drain-s",
        type=float,
        default=0.0,
        metavar="S",
        help="at SIGTERM, finish open parts for at most S seconds (default 0: drop them)",
    )
    command.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, on this machine alone if HOST is left out; 0 for none"
        " (default: BATCHLLM_METRICS_PORT, or none)",
    )
    command.set_defaults(check=_check)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    check_plan(parser, args)
    args.metrics = _metrics_address(parser, args.metrics_port)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Generate the shard, print a line of counts and return them."""
    from batchllm_operator.run.draining import Drain
    from batchllm_operator.run.stage import run_shard

    drain, uri = Drain(), plan_uri(args)
    with drain.on_sigterm(args.drain_s) if args.drain_s else nullcontext():
        report = run_shard(
            uri,
            args.shard,
            num_gpus=args.num_gpus,
            owner=args.owner,
            drain=drain,
            observe=lambda tally: _metrics_of(tally, args.metrics),
        )
    print(
        f"shard {report.shard_idx}: {report.num_rows:,} rows, {report.num_failed_rows:,} failed;"
        f" {report.num_parts} parts, {report.num_resumed_parts} of them done before"
    )
    return {"plan_uri": uri, **report.model_dump()}


@contextmanager
def _metrics_of(tally: ShardTally, address: MetricsAddress | None) -> Iterator[None]:
    from batchllm_operator.metrics import ShardCollector, serving_metrics

    collector = ShardCollector(job=tally.job, ds=tally.ds)
    with collector.watching(tally.snapshot), serving_metrics(address, collector):
        yield


def _metrics_address(parser: argparse.ArgumentParser, given: str | None) -> MetricsAddress | None:
    """Where to serve metrics, by the command line or else the environment."""
    from batchllm_operator.metrics import ADDRESS_VARIABLE, MetricsAddress

    where, text = "--metrics-port", given
    if text is None:
        where, text = ADDRESS_VARIABLE, os.environ.get(ADDRESS_VARIABLE, "")
    try:
        return MetricsAddress.parse(text.strip())
    except ValueError as error:
        parser.error(f"run: {where}: {error}")
