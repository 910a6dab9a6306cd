"""The command `batchllm report`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchllm_operator.commands.arguments import add_plan, check_plan, tell_plan
from batchllm_operator.named_file import parse_file, write_file
from batchllm_operator.secrets.masking import print_unmasked


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command).add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="URIs of two committed plans: print what changed from A to B",
    )
    command.add_argument(
        "--out", type=parse_file, metavar="FILE", help="write the page (HTML) there as well"
    )


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    check_plan(args)
    from batchllm_operator.commit.commit_run import published_plan_uri
    from batchllm_operator.commit.report import load_report, store_page
    from batchllm_operator.report import comparison, format_summary
    from batchllm_operator.report.page import render_report
    from batchllm_operator.spec import load_spec
    from batchllm_operator.storage import Folder

    if args.compare is not None:
        compared = comparison.compare(*map(load_report, args.compare))
        if args.out is not None:
            write_file(args.out, comparison.render_comparison(compared).encode())
        print_unmasked(comparison.format_comparison(compared))
        return {"before": compared.before.figures(), "after": compared.after.figures()}
    plan_uri = args.plan
    if plan_uri is None:  # the published plan: the latest one may not have run yet
        spec = load_spec(args.job)
        plan_uri = published_plan_uri(spec, args.ds)
        tell_plan(spec, args.job, plan_uri, "published")
    report = load_report(plan_uri)
    store_page(Folder.open(plan_uri), report)  # another release may have drawn it
    if args.out is not None:
        write_file(args.out, render_report(report).encode())
    print_unmasked(format_summary(report))  # key columns may have any name
    return report.figures()
