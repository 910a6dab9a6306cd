"""Attempts as bars of a chart."""

from datetime import timedelta
from typing import Any

import pytest
from support.shard_progress import shard_progress

from batchllm_operator.commit import work_bars as chart
from batchllm_operator.commit.work_bars import work_bars
from batchllm_operator.shards.attempts import ShardProgress
from batchllm_operator.shards.job_status import ShardAttempts

START = shard_progress().started_at


def attempt(
    start_s: float, end_s: float, *, before_s: float = 0.0, **changes: Any
) -> ShardProgress:
    """One that holds its GPUs from `start_s`, and began `before_s` earlier."""
    fields = {
        "attempt": 1,
        "state": "finished",
        "started_at": START + timedelta(seconds=start_s - before_s),
        "elapsed_s": end_s - start_s + before_s,
        "gpu_held_s": end_s - start_s,
    }
    return shard_progress(**{**fields, **changes})


def shards(*begun: list[ShardProgress]) -> list[ShardAttempts]:
    return [ShardAttempts(len(made), tuple(made)) for made in begun]


def test_a_bar_is_the_time_for_which_a_worker_had_a_shard_to_itself() -> None:
    bars = work_bars(
        shards(
            [attempt(0, 10), attempt(30, 50, attempt=2, worker=1, host="b")],
            [attempt(10, 25, before_s=4, state="running")],
            [],
        )
    )
    assert [(bar.worker, bar.shard_idx, bar.start_s, bar.end_s) for bar in bars] == [
        (0, 0, 0.0, 10.0),
        (0, 1, 10.0, 25.0),
        (1, 0, 30.0, 50.0),
    ]
    assert [(bar.took_over, bar.ending) for bar in bars] == [
        (False, "finished"),
        (False, "silent"),
        (True, "finished"),
    ]
    assert work_bars(shards([], [])) == ()


def test_short_bars_of_many_are_joined_but_none_that_took_over() -> None:
    num = 10_000
    begun = [[attempt(idx, idx + 1, worker=0)] for idx in range(num)]
    begun[5000] = [
        attempt(5000, 5000.5, worker=0, state="failed"),
        attempt(5001, 5002, worker=1, attempt=2),
    ]
    bars = work_bars(shards(*begun))
    assert 500 < len(bars) <= 1000
    assert sum(bar.num_shards for bar in bars) == num + 1
    unusual = [bar for bar in bars if bar.took_over or bar.ending != "finished"]
    assert [(bar.shard_idx, bar.num_shards) for bar in unusual] == [(5000, 1), (5000, 1)]
    assert bars[-1].worker == 1


@pytest.mark.parametrize("nums", [[600, 100], [250] * 40, [980] + [1] * 39, [1500] + [30] * 39])
def test_every_worker_is_drawn_to_its_end(nums: list[int]) -> None:
    made = [(worker, idx, num) for worker, num in enumerate(nums) for idx in range(num)]
    begun = [
        [attempt(9000 / num * idx, 9000 / num * (idx + 1), worker=worker)]
        for worker, idx, num in made
    ]
    bars = work_bars(shards(*begun))
    assert min(1000, len(made)) // 4 < len(bars) <= 1000
    assert sum(bar.num_shards for bar in bars) == len(made)
    ends = {bar.worker: bar.end_s for bar in bars}
    assert [round(ends[worker]) for worker in range(len(nums))] == [9000] * len(nums)


def test_of_many_workers_those_with_trouble_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "_MOST_WORKERS", 3)
    begun = [[attempt(0, 9, worker=idx)] for idx in range(6)]
    begun[5].append(attempt(20, 21, worker=4, attempt=2))
    assert [bar.worker for bar in work_bars(shards(*begun))] == [0, 1, 4, 4]


def test_the_engines_start_is_told_apart_from_what_it_held_before() -> None:
    first = attempt(0, 100, engine_start_s=40.0, num_gpus=2)
    assert first.start_gpu_s == 80.0
    fed_early = attempt(100, 160, before_s=30, engine_start_s=25.0, num_gpus=2)
    assert fed_early.start_gpu_s == 0.0, "it ran before the shard ahead of it had ended"
    assert ShardAttempts(2, (first, fed_early)).start_gpu_s == 80.0
