"""The command `batchllm verify`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.amounts import counted
from batchllm_operator.commands.arguments import add_plan, add_work, check_work, load_job, plan_uri
from batchllm_operator.commands.run import format_worker

_OF_A_SHARD: Final = ({"plan", "shard"}, {"job", "ds", "shard"})
_OF_A_WORKER: Final = ({"plan", "worker"}, {"job", "ds", "worker"})
_OF_A_PLAN: Final = ({"record", "job", "ds"}, {"record", "job_json", "ds"})


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command).add_argument(
        "--job-json", metavar="JSON", help="the job spec itself; with --record"
    )
    add_work(command)
    command.add_argument(
        "--owner",
        metavar="ID",
        help="as for `run`: if the shard isn't whole, and an attempt of another owner is at work on"
        " it, end with exit code 7; a worker's counts are those of its owner's shards",
    )
    command.add_argument("--record", metavar="NAME", help="as for `plan`; needs the job and --ds")
    command.set_defaults(check=_check)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Accept a shard or a worker of a plan, or a record of a job and partition."""
    names = ("plan", "shard", "worker", "record", "ds", "job", "job_json")
    given = {name for name in names if getattr(args, name) is not None}
    if given not in (*_OF_A_SHARD, *_OF_A_WORKER, *_OF_A_PLAN):
        parser.error(
            "verify: give --shard, or --worker and --num-workers, with --plan or with --job and"
            " --ds; or --record with --job or --job-json and --ds"
        )
    if args.record is None:
        check_work(parser, args)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Check a stage's results in the lake, and return its counts."""
    from batchllm_operator.inspect.verify import verify_plan, verify_shard, verify_worker

    if args.record is not None:
        return verify_plan(load_job(args), args.ds, args.record)
    uri = plan_uri(args)
    if args.worker is not None:
        found = verify_worker(uri, args.worker, args.num_workers, args.owner)
        result = {"plan_uri": uri, **found.to_result()}
        print(format_worker(result))
        return result
    report = verify_shard(uri, args.shard, args.owner)
    print(
        f"shard {report.shard_idx}: complete, {counted(report.num_rows, 'row')} in"
        f" {counted(report.num_parts, 'part')}"
    )
    return {"plan_uri": uri, **report.model_dump()}
