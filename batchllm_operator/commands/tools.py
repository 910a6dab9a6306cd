"""The commands beside a job's stages: `gc`, `schema`, and the demo's table and model."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from batchllm_operator.amounts import byte_size, counted
from batchllm_operator.commands.arguments import add_job, load_job
from batchllm_operator.secrets.masking import print_unmasked

_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SCHEMAS: Final = {
    "job": "batchllm_operator.spec:JobSpec",
    "report": "batchllm_operator.stored_plan.run_report:RunReport",
    "progress": "batchllm_operator.shards.attempts:ShardProgress",
}


def add_gc_arguments(command: argparse.ArgumentParser) -> None:
    add_job(command, ds="only this partition")
    command.add_argument(
        "--older-than",
        type=parse_age,
        default="7d",
        metavar="AGE",
        help="only what hasn't changed for so long, such as 36h, 7d or 2w (default: 7d): longer"
        " than any part, and any commit, takes",
    )
    command.add_argument("--yes", action="store_true", help="remove it; without, only list it")


def parse_age(text: str) -> float:
    """Seconds of an age such as `36h`; raises `argparse.ArgumentTypeError` for another text."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} isn't an age: write a number and s, m, h, d or w, such as 7d"
        )
    return float(int(match[1]) * _UNIT_S[match[2]])


def gc(args: argparse.Namespace) -> Mapping[str, Any]:
    """List what a job has left behind and no longer needs; --yes removes it."""
    spec = load_job(args)
    from batchllm_operator.inspect.gc import find_garbage, remove_garbage

    now = time.time()
    garbage, kept = find_garbage(spec, before=now - args.older_than, ds=args.ds)
    if args.yes:
        garbage, changed = remove_garbage(garbage)
        kept += changed
    for files in garbage:
        days = (now - files.modified_at) / _UNIT_S["d"]
        print(
            f"{'removed' if args.yes else 'would remove'} {counted(len(files.files), 'file')},"
            f" {byte_size(files.num_bytes)}, {days:,.1f} days old: {files.folder.uri}"
            f" ({files.what})"
        )
    for plan in kept:
        print(f"kept: {plan.folder.uri}: {plan.why}")
    num_files = sum(len(files.files) for files in garbage)
    num_bytes = sum(files.num_bytes for files in garbage)
    print(
        f"{counted(num_files, 'file')}, {byte_size(num_bytes)} in all"
        + ("" if args.yes or not garbage else "; to remove them, add --yes")
    )
    return {
        "is_removed": args.yes,
        "num_files": num_files,
        "num_bytes": num_bytes,
        "num_folders": len(garbage),
        "num_kept": len(kept),
    }


def add_schema_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="?",
        choices=_SCHEMAS,
        default="job",
        help="job spec, a run's report.json, or an attempt's progress.json (default job)",
    )


def schema(args: argparse.Namespace) -> Mapping[str, Any]:
    """Print the JSON schema of the job spec, or of another file."""
    fields: dict[str, Any] = resolve_name(_SCHEMAS[args.what]).model_json_schema()
    print_unmasked(json.dumps(fields, indent=2))
    return fields


def add_demo_model_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="DIR")


def demo_model(args: argparse.Namespace) -> Mapping[str, Any]:
    """Make a tiny model with random weights."""
    from batchllm_operator.demo.model import build_demo_model

    build_demo_model(args.folder)
    print(f"demo model: {args.folder}")
    return {"folder": str(args.folder)}


def add_demo_table_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--ds", required=True, help="the partition to make")


def demo_table(args: argparse.Namespace) -> Mapping[str, Any]:
    """Make a small table from installed packages' texts."""
    from batchllm_operator.demo.table import build_demo_table

    print(f"demo table: {build_demo_table(args.folder, ds=args.ds)}")
    return {"folder": str(args.folder)}
