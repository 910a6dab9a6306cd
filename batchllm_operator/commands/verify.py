"""The command `batchllm verify`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.commands.arguments import add_plan, load_job, plan_uri

_OF_A_SHARD: Final = ({"plan", "shard"}, {"job", "ds", "shard"})
_OF_A_PLAN: Final = ({"record", "job", "ds"}, {"record", "job_json", "ds"})


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command).add_argument(
        "--job-json", metavar="JSON", help="the job spec itself; with --record"
    )
    command.add_argument("--shard", type=int, metavar="I", help="of the plan, from 0")
    command.add_argument(
        "--owner",
        metavar="ID",
        help="as for `run`: if the shard isn't whole, and an attempt of another owner is at work on"
        " it, end with exit code 7",
    )
    command.add_argument("--record", metavar="NAME", help="as for `plan`; needs the job and --ds")
    command.set_defaults(check=_check)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Accept either a shard of a plan, or a record of a job and partition."""
    names = ("plan", "shard", "record", "ds", "job", "job_json")
    given = {name for name in names if getattr(args, name) is not None}
    if given not in (*_OF_A_SHARD, *_OF_A_PLAN):
        parser.error(
            "verify: give --shard with --plan or with --job and --ds, or --record with --job or"
            " --job-json and --ds"
        )


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Check a stage's results in the lake, and return its counts."""
    from batchllm_operator.inspect.verify import verify_plan, verify_shard

    if args.record is not None:
        return verify_plan(load_job(args), args.ds, args.record)
    uri = plan_uri(args)
    report = verify_shard(uri, args.shard, args.owner)
    print(
        f"shard {report.shard_idx}: complete, {report.num_rows:,} rows in {report.num_parts} parts"
    )
    return {"plan_uri": uri, **report.model_dump()}
