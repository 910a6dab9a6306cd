"""The command `batchllm failed`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.amounts import counted, printable
from batchllm_operator.commands.arguments import add_plan, plan_uri
from batchllm_operator.secrets.masking import print_unmasked

if TYPE_CHECKING:
    from batchllm_operator.commit.failed_rows import FailedRows

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
    from batchllm_operator.commit.failed_rows import find_failed_rows

    failed = find_failed_rows(plan_uri(args), args.limit)
    print_unmasked("\n".join(_lines(failed)))  # key columns may have any name
    return {**asdict(failed), "num_failed_rows": failed.num_failed_rows}


def _lines(failed: FailedRows) -> Iterator[str]:
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
        yield printable(f"  {key}: {row.kind}{row.message and ': ' + row.message}")
    if num_more := num_failed - len(failed.rows):
        yield f"  {num_more:,} more; --limit {num_failed} lists all"
