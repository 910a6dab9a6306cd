"""The commands that show what a run has done: `report`, `status` and `failed`."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TextIO

from batchllm_operator.amounts import counted, printable
from batchllm_operator.commands.arguments import add_plan, check_plan, number, plan_uri
from batchllm_operator.named_file import parse_file, write_file
from batchllm_operator.secrets.masking import print_unmasked

if TYPE_CHECKING:
    from batchllm_operator.commit.failed_rows import FailedRows
    from batchllm_operator.shards.status import JobStatus
    from batchllm_operator.stored_plan.counts import Counts

_DEFAULT_INTERVAL_S: Final = 5.0
_DEFAULT_LIMIT: Final = 20
_MOST_ROWS: Final = 10**12
_NARROWEST: Final = 20
_NOT_IN_RESULT: Final = ("bill", "refusal")
_TOTALS: Final = (
    *("num_rows", "num_finished", "is_finished", "computed_tokens_per_s", "output_tokens_per_s"),
    *("eta_s", "gpu_s", "num_live_workers"),
)
"""Properties of `JobStatus` in the result."""


def add_report_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command).add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="URIs of two committed plans: print what changed from A to B",
    )
    command.add_argument(
        "--out", type=parse_file, metavar="FILE", help="write the page (HTML) there as well"
    )


def report(args: argparse.Namespace) -> Mapping[str, Any]:
    """Print what a committed run did, or compare two."""
    check_plan(args)
    from batchllm_operator.commit.report import load_report, store_page
    from batchllm_operator.report import comparison, format_summary
    from batchllm_operator.report.page import render_report
    from batchllm_operator.storage import Folder

    if args.compare is not None:
        compared = comparison.compare(*map(load_report, args.compare))
        if args.out is not None:
            write_file(args.out, comparison.render_comparison(compared).encode())
        print_unmasked(comparison.format_comparison(compared))
        return {"before": compared.before.figures(), "after": compared.after.figures()}
    uri = plan_uri(args, which="published")  # the newest one may not have run yet
    loaded = load_report(uri)
    store_page(Folder.open(uri), loaded)  # another release may have drawn it
    if args.out is not None:
        write_file(args.out, render_report(loaded).encode())
    print_unmasked(format_summary(loaded))  # key columns may have any name
    return loaded.figures()


def add_status_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    command.add_argument(
        "--follow",
        action="store_true",
        help="look again until all shards are finished, or the plan is committed",
    )
    command.add_argument(
        "--interval",
        type=number(float, 1e-3, 86_400),
        default=_DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"seconds between two looks with --follow (default: {_DEFAULT_INTERVAL_S:g})",
    )


def status(args: argparse.Namespace) -> Mapping[str, Any]:
    """Print how far the run of a plan is, by shards."""
    uri = plan_uri(args)
    from batchllm_operator.report import format_status
    from batchllm_operator.shards.job_status import read_status
    from batchllm_operator.stored_plan.stored_plan import StoredPlan

    plan = StoredPlan.open(uri)
    if args.follow:
        return status_result(follow(lambda: read_status(plan), args.interval, sys.stdout))
    now = read_status(plan)
    print(format_status(now), flush=True)
    return status_result(now)


def status_result(status: JobStatus) -> dict[str, Any]:
    def counts(done: Counts) -> dict[str, Any]:
        return {**done.model_dump(), "saving_ratio": done.saving_ratio}

    fields = asdict(status)
    return {
        **{name: value for name, value in fields.items() if name not in _NOT_IN_RESULT},
        **{name: getattr(status, name) for name in _TOTALS},
        "read_at": status.read_at.isoformat(),
        "num_parts": sum(shard.num_parts for shard in status.shards),
        "num_parts_done": sum(shard.num_parts_done for shard in status.shards),
        "done": counts(status.done),
        "shards": [
            {**asdict(shard), "done": counts(shard.done), "is_live": shard.is_live}
            for shard in status.shards
        ],
        "workers": [{**asdict(worker), "is_live": worker.is_live} for worker in status.workers],
        "predicted_gpu_s": status.bill.predicted_gpu_s,
        "predicted_cost_usd": status.bill.predicted_cost_usd,
        "refused": None if status.refusal is None else status.refusal.reason,
    }


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
    """Show lines cut to the terminal's size, as wrapped ones scroll; returns their number."""
    size = shutil.get_terminal_size()
    lines = text.splitlines()[: max(1, size.lines - 1)]
    for line in lines:
        print(line[: max(_NARROWEST, size.columns - 1)], file=stream)
    stream.flush()
    return len(lines)


def add_failed_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    command.add_argument(
        "--limit",
        type=number(int, 0, _MOST_ROWS),
        default=_DEFAULT_LIMIT,
        metavar="N",
        help=f"rows to list, the first in input order (default: {_DEFAULT_LIMIT}); all are counted",
    )


def failed(args: argparse.Namespace) -> Mapping[str, Any]:
    """List the rows of a run that have failed, before its commit or after."""
    from batchllm_operator.commit.failed_rows import find_failed_rows

    rows = find_failed_rows(plan_uri(args), args.limit)
    print_unmasked("\n".join(_failed_lines(rows)))  # key columns may have any name
    return {**asdict(rows), "num_failed_rows": rows.num_failed_rows}


def _failed_lines(failed: FailedRows) -> Iterator[str]:
    num_failed, num_left = failed.num_failed_rows, failed.num_rows - failed.num_rows_done
    state = "published" if failed.is_committed else "not published"
    if num_left:
        state += f", {counted(num_left, 'row has', 'rows have')} no outcome yet"
    yield printable(
        f"job {failed.job}, partition {failed.ds}: {num_failed:,} of"
        f" {counted(failed.num_rows, 'row')} failed; {state}"
    )
    if failed.errors_by_kind:
        kinds = (f"{number:,} {kind}" for kind, number in failed.errors_by_kind.items())
        yield printable(f"  by kind: {', '.join(kinds)}")
    for row in failed.rows:
        key = ", ".join(f"{name}={value}" for name, value in row.key.items())
        key += f", {row.prompt}" if row.prompt is not None else ""
        yield printable(f"  {key}: {row.kind}{row.message and ': ' + row.message}")
    if num_more := num_failed - len(failed.rows):
        yield f"  {num_more:,} more; --limit {num_failed} lists all"
    if failed.retry is not None:
        yield printable(f"  to ask only the failed rows again: {failed.retry}")
