"""The command `batchllm schema`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Final

from batchllm_operator.secrets.masking import print_unmasked

_MODELS: Final = {
    "job": "batchllm_operator.spec:JobSpec",
    "report": "batchllm_operator.stored_plan.run_report:RunReport",
    "progress": "batchllm_operator.shards.attempts:ShardProgress",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="?",
        choices=_MODELS,
        default="job",
        help="job spec, a run's report.json, or an attempt's progress.json (default job)",
    )


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    schema: dict[str, Any] = resolve_name(_MODELS[args.what]).model_json_schema()
    print_unmasked(json.dumps(schema, indent=2))
    return schema
