"""What workers did when: the attempts at shards as bars of a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, groupby
from typing import Final

from batchllm_operator.shards.attempts import ShardProgress, State, Worker
from batchllm_operator.shards.job_status import ShardAttempts
from batchllm_operator.stored_plan.timeline import Ending, WorkBar

_MOST_BARS: Final = 1000
_MOST_WORKERS: Final = 40
_ENDINGS: Final[dict[State, Ending]] = {
    "starting": "silent",
    "running": "silent",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def work_bars(shards: Sequence[ShardAttempts]) -> tuple[WorkBar, ...]:
    """The attempts at shards, whose numbers are their positions, by worker and time.

    Of 40 workers at most, first those with attempts that took over or were taken over. Where bars
    are more than 1,000, short ones are joined. Attempts without progress are left out.
    """
    made = [(idx, each) for idx, begun in enumerate(shards) for each in begun.progress]
    if not made:
        return ()
    began_at = min(progress.started_at for _, progress in made)
    bars = sorted((_bar(idx, each, began_at) for idx, each in made), key=_place)
    by_worker = [list(own) for _, own in groupby(bars, key=_maker)]
    by_worker.sort(key=lambda own: all(map(_is_plain, own)))  # stable
    by_worker = sorted(by_worker[:_MOST_WORKERS], key=lambda own: _maker(own[0]))
    end_s = max(bar.end_s for bar in bars)
    least_s = end_s / _MOST_BARS
    while sum(map(len, by_worker)) > _MOST_BARS and least_s <= 2 * end_s:
        by_worker, least_s = [_joined(own, least_s) for own in by_worker], 2 * least_s
    return tuple(chain.from_iterable(by_worker))[:_MOST_BARS]


def _bar(shard_idx: int, progress: ShardProgress, began_at: datetime) -> WorkBar:
    end_s = (progress.started_at - began_at).total_seconds() + progress.elapsed_s
    return WorkBar(
        worker=progress.worker,
        host=progress.host,
        shard_idx=shard_idx,
        attempt=progress.attempt,
        start_s=round(max(0.0, end_s - progress.gpu_held_s), 3),
        end_s=round(end_s, 3),
        ending=_ENDINGS[progress.state],
    )


def _maker(bar: WorkBar) -> Worker:
    return bar.worker, bar.host


def _place(bar: WorkBar) -> tuple[Worker, float, int]:
    return _maker(bar), bar.start_s, bar.shard_idx


def _is_plain(bar: WorkBar) -> bool:
    return bar.ending == "finished" and not bar.took_over


def _joined(bars: Iterable[WorkBar], least_s: float) -> list[WorkBar]:
    """The bars of a worker, with plain ones joined where both together are short."""
    joined: list[WorkBar] = []
    for bar in bars:
        last = joined[-1] if joined else bar
        is_short = _is_plain(bar) and _is_plain(last) and bar.end_s - last.start_s < least_s
        if joined and is_short:
            num_shards = last.num_shards + bar.num_shards
            joined[-1] = last.model_copy(update={"num_shards": num_shards, "end_s": bar.end_s})
        else:
            joined.append(bar)
    return joined
