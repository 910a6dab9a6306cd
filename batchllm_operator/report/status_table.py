"""A job's status for a terminal: a line of totals, a table of workers and one of shards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, get_args

from batchllm_operator.amounts import clipped, counted, printable, text_table, token_speed
from batchllm_operator.progress import duration
from batchllm_operator.shards.status import (
    JobStatus,
    ShardState,
    ShardStatus,
    WorkerState,
    WorkerStatus,
)

_MOST_LINES: Final = 30
_MAX_ERROR_CHARS: Final = 120
_Item = TypeVar("_Item", ShardStatus, WorkerStatus)


def format_status(status: JobStatus) -> str:
    """Totals, workers and shards for a terminal; no trailing line break.

    If there are more than 30 workers, only live ones are listed, and others counted. If there are
    more than 30 shards, finished ones are only counted; if still more than 30 are left, waiting
    ones, too.
    """
    lines = [format_totals(status)]
    workers = list(status.workers)
    if len(workers) > _MOST_LINES:
        workers = [worker for worker in workers if worker.is_live]
    shards = list(status.shards)
    for state in ("finished", "waiting"):
        if len(shards) > _MOST_LINES:
            shards = [shard for shard in shards if shard.state != state]
    lines += _table(workers, _WORKER_COLUMNS, status.unit)
    if others := [worker for worker in status.workers if worker not in workers]:
        lines.append(f"  workers not shown: {_count_states(others, WorkerState)}")
    lines += _table(shards, _SHARD_COLUMNS, status.unit)
    listed = {shard.shard_idx for shard in shards}
    if left_out := [shard for shard in status.shards if shard.shard_idx not in listed]:
        lines.append(f"  not shown: {_count_states(left_out, ShardState)}")
    lines += [
        f"  shard {shard.shard_idx}: {clipped(printable(shard.error), _MAX_ERROR_CHARS)}"
        for shard in shards
        if shard.error is not None
    ]
    lines += [f"  note: {printable(note)}" for note in status.notes]
    if (refusal := status.refusal) is not None:
        when = f"{refusal.refused_at:%Y-%m-%d %H:%M} UTC"
        lines.append(f"  commit refused, {when}: {printable(refusal.reason)}")
    return "\n".join(lines)


def format_totals(status: JobStatus) -> str:
    done, states = status.done, _count_states(status.shards, ShardState)
    at_work = bool(status.workers) and not status.is_finished
    parts = [
        f"round {status.round} of {status.num_rounds}" if status.num_rounds > 1 else "",
        f"{_share(done.num_rows, status.num_rows)} {status.unit}s",
        f"{done.num_failed_rows:,} failed" if done.num_failed_rows else "",
        f"{status.num_rejected_rows:,} rejected" if status.num_rejected_rows else "",
        "committed" if status.is_committed else f"shards: {states}",
        f"{counted(status.num_live_workers, 'worker')} at work" if at_work else "",
    ]
    if not status.is_finished:
        eta = "unknown" if status.eta_s is None else duration(status.eta_s)
        speed = token_speed(status.computed_tokens_per_s, status.output_tokens_per_s)
        parts += [speed, f"ETA {eta}"]
    if done.saving_ratio is not None:
        parts.insert(-1, f"{100 * done.saving_ratio:.0f} % of prompt tokens saved")
    words = ", ".join(filter(None, parts))
    return f"job {printable(status.job)}, partition {printable(status.ds)}: {words}"


def _count_states(items: Sequence[ShardStatus | WorkerStatus], states: object) -> str:
    counts = {state: sum(item.state == state for item in items) for state in get_args(states)}
    return ", ".join(f"{count:,} {state}" for state, count in counts.items() if count) or "none"


_Columns = Mapping[str, Callable[[_Item], str]]


def _table(items: Sequence[_Item], columns: _Columns[_Item], unit: str) -> list[str]:
    """Lines of a table; none without items."""
    if not items:
        return []
    rows: list[list[str]] = [[cell(item) for cell in columns.values()] for item in items]
    left = [idx for idx, name in enumerate(columns) if name in _LEFT]
    names = [f"{unit}s" if name == "rows" else name for name in columns]
    return text_table([names, *rows], left, indent="  ")


def _saved(shard: ShardStatus) -> str:
    ratio = shard.done.saving_ratio
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def _eta(shard: ShardStatus) -> str:
    return duration(shard.eta_s) if shard.is_live and shard.eta_s is not None else ""


def _last_sign(item: ShardStatus | WorkerStatus) -> str:
    if item.age_s is None:
        return "none" if item.state == "silent" else ""
    age = duration(item.age_s)
    return f"no sign for {age}" if item.state == "silent" else f"{age} ago"


def _share(count: int, total: int) -> str:
    percent = 100 * count / total if total else 100.0
    return f"{count:,}/{total:,} ({percent:.0f} %)"


_LEFT: Final = ("state", "last sign", "host")
_SPEEDS: Final[Mapping[str, Callable[[ShardStatus | WorkerStatus], str]]] = {
    "computed/s": lambda item: f"{item.computed_tokens_per_s:,.0f}" if item.is_live else "",
    "output/s": lambda item: f"{item.output_tokens_per_s:,.0f}" if item.is_live else "",
}
_SHARD_COLUMNS: Final[_Columns[ShardStatus]] = {
    "shard": lambda shard: str(shard.shard_idx),
    "state": lambda shard: shard.state,
    "worker": lambda shard: "" if shard.worker is None else str(shard.worker),
    "rows": lambda shard: _share(shard.done.num_rows, shard.num_rows),
    "parts": lambda shard: f"{shard.num_parts_done:,}/{shard.num_parts:,}",
    **_SPEEDS,
    "saved": _saved,
    "ETA": _eta,
    "last sign": _last_sign,
}
_WORKER_COLUMNS: Final[_Columns[WorkerStatus]] = {
    "worker": lambda worker: str(worker.worker),
    "state": lambda worker: worker.state,
    "runs": lambda worker: ", ".join(map(str, worker.live_shards)),
    "finished": lambda worker: f"{worker.num_finished:,}",
    "rows": lambda worker: f"{worker.num_rows_done:,}",
    **_SPEEDS,
    "GPU time": lambda worker: duration(worker.gpu_s) if worker.gpu_s else "",
    "last sign": _last_sign,
    "host": lambda worker: printable(worker.host),
}
