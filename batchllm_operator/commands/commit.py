"""The command `batchllm commit`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchllm_operator.commands.plan_argument import add_plan, plan_uri

# Heavy imports wait until the command runs, so that --help answers at once.


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    add_plan(command)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Publish the partition, print the counts, and return the report's figures.

    Raises:
        BatchLLMError: see `commit.stage`.
    """
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
