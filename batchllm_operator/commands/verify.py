"""The command `batchllm verify`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.commands.arguments import (
    UsageError,
    add_plan,
    add_worker,
    check_worker,
    load_job,
    plan_uri,
)
from batchllm_operator.commands.run import format_worker

_GOES_TOGETHER: Final = (
    *({"plan"}, {"job", "ds"}),  # of a worker
    *({"record", "job", "ds"}, {"record", "job_json", "ds"}),  # of planning
)


def add_arguments(command: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    names = ("plan", "record", "ds", "job", "job_json")
    if {name for name in names if getattr(args, name) is not None} not in _GOES_TOGETHER:
        raise UsageError(
            "give --plan, or --job and --ds; or --record with --job or --job-json and --ds"
        )
    check_worker(args)
    from batchllm_operator.inspect.verify import verify_plan, verify_worker

    if args.record is not None:
        return verify_plan(load_job(args), args.ds, args.record)
    uri = plan_uri(args)
    report = verify_worker(uri, args.worker, args.num_workers, args.owner)
    result = {"plan_uri": uri, **report.to_result()}
    print(format_worker(result))
    return result
