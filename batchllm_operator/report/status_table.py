"""A job's status for a terminal: a line of totals and a table of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from batchllm_operator.artifacts.status import JobStatus, ShardState, ShardStatus
from batchllm_operator.progress import duration

_MOST_SHARDS: Final = 30
_MAX_ERROR_CHARS: Final = 120
_HEADINGS: Final = ("shard", "state", "rows", "parts", "tokens/s", "saved", "ETA", "last sign")
_IS_LEFT: Final = (False, True, False, False, False, False, False, True)


def format_status(status: JobStatus) -> str:
    """Totals and shards for a terminal; no trailing line break.

    If there are more than 30 shards, finished ones are only counted; if still more than 30 are
    left, waiting ones, too.
    """
    shown, left_out = _shown(status.shards)
    lines = [format_totals(status)]
    if shown:
        lines += _table(shown)
    if left_out:
        lines.append(f"  not shown: {_count_states(left_out)}")
    lines += [
        f"  shard {shard.shard_idx}: {_clip(shard.error)}"
        for shard in shown
        if shard.error is not None
    ]
    lines += [f"  note: {_printable(note)}" for note in status.notes]
    return "\n".join(lines)


def format_totals(status: JobStatus) -> str:
    parts = [
        f"{_share(status.num_rows_done, status.num_rows)} rows",
        f"{status.num_rows_failed:,} failed" if status.num_rows_failed else "",
        "committed" if status.is_committed else f"shards: {_count_states(status.shards)}",
    ]
    if not status.is_finished:
        eta = "unknown" if status.eta_s is None else duration(status.eta_s)
        parts += [f"{status.tokens_per_s:,.0f} tokens/s", f"ETA {eta}"]
    if status.saving_ratio is not None:
        parts.insert(-1, f"{100 * status.saving_ratio:.0f} % saved")
    words = ", ".join(filter(None, parts))
    return f"job {_printable(status.job)}, partition {_printable(status.ds)}: {words}"


def _shown(shards: Sequence[ShardStatus]) -> tuple[list[ShardStatus], list[ShardStatus]]:
    shown = list(shards)
    for state in ("finished", "waiting"):
        if len(shown) > _MOST_SHARDS:
            shown = [shard for shard in shown if shard.state != state]
    listed = {shard.shard_idx for shard in shown}
    return shown, [shard for shard in shards if shard.shard_idx not in listed]


def _count_states(shards: Sequence[ShardStatus]) -> str:
    counts = {
        state: sum(shard.state == state for shard in shards) for state in get_args(ShardState)
    }
    return ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none"


def _table(shards: Sequence[ShardStatus]) -> list[str]:
    rows = [_HEADINGS, *(_row(shard) for shard in shards)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, _IS_LEFT, strict=True)
        ).rstrip()
        for row in rows
    ]


def _row(shard: ShardStatus) -> tuple[str, ...]:
    return (
        str(shard.shard_idx),
        shard.state,
        _share(shard.num_rows_done, shard.num_rows),
        f"{shard.num_parts_done:,}/{shard.num_parts:,}",
        f"{shard.tokens_per_s:,.0f}" if shard.is_live else "",
        "" if shard.saving_ratio is None else f"{100 * shard.saving_ratio:.0f} %",
        duration(shard.eta_s) if shard.is_live and shard.eta_s is not None else "",
        _last_sign(shard),
    )


def _last_sign(shard: ShardStatus) -> str:
    if shard.age_s is None:
        return "none" if shard.state == "silent" else ""
    age = duration(shard.age_s)
    return f"no sign for {age}" if shard.state == "silent" else f"{age} ago"


def _share(count: int, total: int) -> str:
    percent = 100 * count / total if total else 100.0
    return f"{count:,}/{total:,} ({percent:.0f} %)"


def _clip(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 1] + "…"


def _printable(text: str) -> str:
    """Untrusted text without control characters for the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)
