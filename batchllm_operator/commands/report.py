"""The command `batchllm report`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchllm_operator.commands.arguments import add_plan, tell_plan
from batchllm_operator.named_file import parse_file, write_file


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
    if args.compare is not None:
        return _compare(args.compare, args.out)
    from batchllm_operator.commit.commit_run import published_plan_uri
    from batchllm_operator.commit.report import load_report, store_page
    from batchllm_operator.report import format_summary
    from batchllm_operator.secrets.masking import print_unmasked
    from batchllm_operator.spec import load_spec
    from batchllm_operator.storage import Folder

    plan_uri = args.plan
    if plan_uri is None:  # the published plan: the latest one may not have run yet
        spec = load_spec(args.job)
        plan_uri = published_plan_uri(spec, args.ds)
        tell_plan(spec, args.job, plan_uri, "published")
    report = load_report(plan_uri)
    store_page(Folder.open(plan_uri), report)  # another release may have drawn it
    if args.out is not None:
        from batchllm_operator.report.page import render_report

        write_file(args.out, render_report(report).encode())
    print_unmasked(format_summary(report))  # key columns may have any name
    return report.figures()


def _compare(plan_uris: list[str], out: Path | None) -> Mapping[str, Any]:
    from batchllm_operator.commit.report import load_report
    from batchllm_operator.report.comparison import compare, format_comparison, render_comparison
    from batchllm_operator.secrets.masking import print_unmasked

    before, after = map(load_report, plan_uris)
    comparison = compare(before, after)
    if out is not None:
        write_file(out, render_comparison(comparison).encode())
    print_unmasked(format_comparison(comparison))
    return {"before": before.figures(), "after": after.figures()}
