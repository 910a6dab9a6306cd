"""The command `batchllm failed`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.amounts import counted, printable
from batchllm_operator.commands.arguments import add_plan, plan_uri

if TYPE_CHECKING:
    from batchllm_operator.commit.failed_rows import FailedRow, FailedRows

_LIMIT: Final = 20


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_plan(command)
    command.add_argument(
        "--limit",
        type=_parse_limit,
        default=_LIMIT,
        metavar="N",
        help=f"rows to list, the first in input order (default: {_LIMIT}); all are counted",
    )


def _parse_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of rows, from 0")
    return int(text)


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Print the failed rows of a run, finished or not; returns them."""
    from batchllm_operator.commit.failed_rows import find_failed_rows
    from batchllm_operator.secrets.masking import print_unmasked

    found = find_failed_rows(plan_uri(args), args.limit)
    # Key columns may have any name.
    print_unmasked("\n".join(_lines(found)))
    return {**asdict(found), "num_failed_rows": found.num_failed_rows}


def _lines(found: FailedRows) -> Iterator[str]:
    num_failed, num_left = found.num_failed_rows, found.num_rows - found.num_rows_done
    state = "published" if found.is_committed else "not published"
    if num_left:
        state += f", {counted(num_left, 'row has', 'rows have')} no outcome yet"
    yield printable(
        f"job {found.job}, partition {found.ds}: {num_failed:,} of {counted(found.num_rows, 'row')}"
        f" failed; {state}"
    )
    if found.errors_by_kind:
        kinds = (f"{number:,} {kind}" for kind, number in found.errors_by_kind.items())
        yield printable(f"  by kind: {', '.join(kinds)}")
    yield from map(_line, found.rows)
    if num_more := num_failed - len(found.rows):
        yield f"  {num_more:,} more; --limit {num_failed} lists all"


def _line(row: FailedRow) -> str:
    key = ", ".join(f"{name}={value}" for name, value in row.key.items())
    return printable(f"  {key}: {row.kind}{row.message and ': ' + row.message}")
