"""The command `batchllm commit`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchllm_operator.commands.arguments import add_plan, plan_uri


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Publish the partition, print the counts, and return the report's figures."""
    from batchllm_operator.commit.stage import commit_run
    from batchllm_operator.report import share
    from batchllm_operator.spec.masking import print_unmasked

    report = commit_run(plan_uri(args))
    print_unmasked(
        f"published in {report.table_uri}, partition {report.ds}; report: {report.report_uri}"
    )
    failed = share(report.num_rows_failed, report.num_rows_in)
    print(f"{report.num_rows_in:,} rows published, {report.num_rows_failed:,} failed ({failed})")
    return report.figures()
