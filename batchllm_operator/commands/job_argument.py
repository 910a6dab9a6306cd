"""The arguments that give a command a job spec: a file, or the spec itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchllm_operator.spec import JobSpec


def add_job(command: argparse.ArgumentParser) -> None:
    """Give the command the arguments that name a job spec; one of them is required."""
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--job", type=Path, metavar="FILE", help="job spec (YAML)")
    which.add_argument("--job-json", metavar="JSON", help="the job spec itself, paths absolute")


def load_job(args: argparse.Namespace) -> JobSpec:
    """The job spec.

    Raises:
        SpecError: it can't be read, or isn't valid.
    """
    from batchllm_operator.spec import load_spec, parse_spec_json

    if args.job_json is not None:
        return parse_spec_json(args.job_json, source="--job-json")
    return load_spec(args.job)
