"""The command `batchllm schema`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="?",
        choices=("job", "report", "progress"),
        default="job",
        help="job spec, a run's report.json, or an attempt's progress.json (default job)",
    )


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    from batchllm_operator.secrets.masking import print_unmasked

    schema = _model(args.what).model_json_schema()
    print_unmasked(json.dumps(schema, indent=2))
    return schema


def _model(what: str) -> type[BaseModel]:
    if what == "report":
        from batchllm_operator.stored_plan.run_report import RunReport

        return RunReport
    if what == "progress":
        from batchllm_operator.shards.progress import ShardProgress

        return ShardProgress
    from batchllm_operator.spec import JobSpec

    return JobSpec
