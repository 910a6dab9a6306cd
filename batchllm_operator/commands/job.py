"""The command `batchllm job`: all stages of a job on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from batchllm_operator.child_processes import exit_code, start_command
from batchllm_operator.commands import commit, plan, report
from batchllm_operator.commands.arguments import add_job_and_ds
from batchllm_operator.errors import Interrupted


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_job_and_ds(command)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Plan, generate all shards with one worker, commit and report; returns the report's figures.

    A stopped job continues from what earlier calls have finished. The worker's process ends
    before the commit, which frees all of the engine's memory.

    Raises:
        BatchLLMError: see the stages.
        SystemExit: the worker was stopped or has failed; its process has printed the reason.
    """
    planned = plan.run(argparse.Namespace(**vars(args), on=None, record=None, advise=False))
    process = start_command(["run", "--plan", planned["plan_uri"]])
    try:
        status = process.wait()
    except Interrupted as stop:
        process.send_signal(stop.signal_number)
        status = process.wait()
    if status:
        raise SystemExit(exit_code(status))
    uri = planned["plan_uri"]
    of_plan = argparse.Namespace(plan=uri, job=None, ds=None, on=None, compare=None, out=None)
    commit.run(of_plan)
    return {"num_shards": planned["num_shards"], **report.run(of_plan)}
