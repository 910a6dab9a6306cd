"""The command `batchllm commit`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchllm_operator.amounts import counted
from batchllm_operator.commands.arguments import add_engine, add_plan, is_on_spark, plan_uri
from batchllm_operator.secrets.masking import print_unmasked


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    add_engine(command)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    uri = plan_uri(args)
    from batchllm_operator.commit.commit_run import commit_run
    from batchllm_operator.report import share
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    if is_on_spark(args, StoredPlan.open(uri).manifest.spec):
        from batchllm_operator.spark.commit_run import commit_on_spark

        report = commit_on_spark(uri)
    else:
        report = commit_run(uri)
    print_unmasked(
        f"published in {report.table_uri}, partition {report.ds}; report: {report.report_uri}"
    )
    num_rows, num_failed = report.plan.num_rows, report.num_failed_rows
    failed = share(num_failed, num_rows)
    print(f"{counted(num_rows, 'row')} published, {num_failed:,} failed ({failed})")
    return report.figures()
