"""The command `batchllm demo-model`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    from batchllm_operator.demo.model import build_demo_model

    build_demo_model(args.folder)
    print(f"demo model: {args.folder}")
    return {"folder": str(args.folder)}
