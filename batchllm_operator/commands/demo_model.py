"""The command `batchllm demo-model`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Heavy imports wait until the command runs, so that --help answers at once.


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    command.add_argument("folder", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Make the model, and return where it is."""
    from batchllm_operator.demo.model import build_demo_model

    build_demo_model(args.folder)
    print(f"demo model: {args.folder}")
    return {"folder": str(args.folder)}
