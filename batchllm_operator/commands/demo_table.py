"""The command `batchllm demo-table`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--ds", required=True, help="the partition to make")


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    from batchllm_operator.demo.table import build_demo_table

    print(f"demo table: {build_demo_table(args.folder, ds=args.ds)}")
    return {"folder": str(args.folder)}
