"""The command `batchllm gc`."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from batchllm_operator.amounts import byte_size, counted
from batchllm_operator.commands.arguments import add_job, load_job

_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_job(command)
    command.add_argument(
        "--older-than",
        type=parse_age,
        default="7d",
        metavar="AGE",
        help="only what hasn't changed for so long, such as 36h, 7d or 2w (default: 7d): longer"
        " than any part, and any commit, takes",
    )
    command.add_argument("--ds", help="only this partition")
    command.add_argument("--yes", action="store_true", help="remove it; without, only list it")


def parse_age(text: str) -> float:
    """Seconds of an age such as `36h`; raises `argparse.ArgumentTypeError` for another text."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} isn't an age: write a number and s, m, h, d or w, such as 7d"
        )
    return float(int(match[1]) * _UNIT_S[match[2]])


def run(args: argparse.Namespace) -> Mapping[str, Any]:
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
