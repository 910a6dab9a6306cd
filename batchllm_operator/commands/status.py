"""The command `batchllm status`."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TextIO

from batchllm_operator.commands.arguments import add_plan, plan_uri

if TYPE_CHECKING:
    from batchllm_operator.shards.status import JobStatus
    from batchllm_operator.stored_plan.counts import Counts

_DEFAULT_INTERVAL_S: Final = 5.0
_NARROWEST: Final = 20
_NOT_IN_RESULT: Final = ("shards", "workers", "notes", "read_at", "bill", "refusal")


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    command.add_argument(
        "--follow",
        action="store_true",
        help="look again until all shards are finished, or the plan is committed",
    )
    command.add_argument(
        "--interval",
        type=parse_interval,
        default=_DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"seconds between two looks with --follow (default: {_DEFAULT_INTERVAL_S:g})",
    )


def parse_interval(text: str) -> float:
    """Seconds to wait; raises `argparse.ArgumentTypeError` for an unusable interval."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds, up to a day")
    return seconds


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    uri = plan_uri(args)
    from batchllm_operator.report import format_status
    from batchllm_operator.shards.job_status import read_status
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    plan = StoredPlan.open(uri)
    if args.follow:
        status = follow(lambda: read_status(plan), args.interval, sys.stdout)
    else:
        status = read_status(plan)
        print(format_status(status), flush=True)
    return result_of(status)


def result_of(status: JobStatus) -> dict[str, Any]:
    fields = asdict(status)
    totals = (
        "num_rows",
        "num_finished",
        "is_finished",
        "computed_tokens_per_s",
        "output_tokens_per_s",
        "eta_s",
        "gpu_s",
        "num_live_workers",
    )
    return {
        **{name: value for name, value in fields.items() if name not in _NOT_IN_RESULT},
        "read_at": status.read_at.isoformat(),
        **{name: getattr(status, name) for name in totals},
        "num_parts": sum(shard.num_parts for shard in status.shards),
        "num_parts_done": sum(shard.num_parts_done for shard in status.shards),
        "done": _counts(status.done),
        "shards": [
            asdict(shard) | {"done": _counts(shard.done), "is_live": shard.is_live}
            for shard in status.shards
        ],
        "workers": [asdict(worker) | {"is_live": worker.is_live} for worker in status.workers],
        "notes": list(status.notes),
        "predicted_gpu_s": status.bill.predicted_gpu_s,
        "predicted_cost_usd": status.bill.predicted_cost_usd,
        "refused": None if status.refusal is None else status.refusal.reason,
    }


def _counts(done: Counts) -> dict[str, Any]:
    return {**done.model_dump(), "saving_ratio": done.saving_ratio}


def follow(
    read: Callable[[], JobStatus],
    interval_s: float,
    stream: TextIO,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Show the status until nothing is left to generate; the last one is shown in full.

    On a terminal each replaces the one before. Elsewhere a line of totals is printed whenever rows
    or states have changed.
    """
    from batchllm_operator.report import format_status, format_totals

    is_terminal = stream.isatty()
    num_lines, seen = 0, None
    while True:
        status = read()
        if is_terminal and num_lines:
            stream.write(f"\x1b[{num_lines}F\x1b[J")  # cursor up, clear below
        if status.is_finished or status.is_committed:
            print(format_status(status), file=stream, flush=True)
            return status
        states = [(shard.state, shard.done.num_rows) for shard in status.shards]
        if is_terminal:
            num_lines = _show_cut(format_status(status), stream)
        elif states != seen:
            print(format_totals(status), file=stream, flush=True)
        seen = states
        sleep(interval_s)


def _show_cut(text: str, stream: TextIO) -> int:
    """Show lines cut to the terminal's size; returns their number.

    Wrapped lines would scroll the others away.
    """
    size = shutil.get_terminal_size()
    lines = text.splitlines()[: max(1, size.lines - 1)]
    for line in lines:
        print(line[: max(_NARROWEST, size.columns - 1)], file=stream)
    stream.flush()
    return len(lines)
