"""The commands `batchllm demo-table` and `batchllm demo-model`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DemoTable:
    def add_arguments(self, command: argparse.ArgumentParser) -> None:
        command.add_argument("folder", type=Path, metavar="DIR")
        command.add_argument("--ds", required=True, help="the partition to make")

    def run(self, args: argparse.Namespace) -> Mapping[str, Any]:
        from batchllm_operator.demo.table import build_demo_table

        print(f"demo table: {build_demo_table(args.folder, ds=args.ds)}")
        return {"folder": str(args.folder)}


class DemoModel:
    def add_arguments(self, command: argparse.ArgumentParser) -> None:
        command.add_argument("folder", type=Path, metavar="DIR")

    def run(self, args: argparse.Namespace) -> Mapping[str, Any]:
        from batchllm_operator.demo.model import build_demo_model

        build_demo_model(args.folder)
        print(f"demo model: {args.folder}")
        return {"folder": str(args.folder)}
