"""What a process's metrics say about its shards: one, a worker's, and those that have ended."""

from __future__ import annotations

from typing import Any

import pytest
from support.shard_progress import shard_progress

from batchllm_operator.metrics import ShardCollector
from batchllm_operator.shards.attempts import ShardProgress


class Shard:
    """A shard of worker 5, which changes."""

    def __init__(self, shard_idx: int, **fields: Any) -> None:
        self.fields = {"shard_idx": shard_idx, "worker": 5, "num_gpus": 2, **fields}

    def __call__(self) -> ShardProgress:
        return shard_progress(**self.fields)


class Clocked:
    """A collector, and the clock that it goes by."""

    def __init__(self) -> None:
        self.clock = 1000.0
        self.collector = ShardCollector(job="j", ds="d", worker=5, clock=lambda: self.clock)

    def run(self, shard: Shard, **fields: Any) -> None:
        """Begin a shard, and end it."""
        with self.collector.watching(shard):
            shard.fields |= {"state": "finished", "num_rows_done": 100, **fields}

    def values(self, name: str) -> dict[str, float]:
        """The samples of a name by their shard, which each has once; "" for the worker's."""
        found = [
            sample
            for family in self.collector.collect()
            for sample in family.samples
            if sample.name == f"batchllm_{name}"
        ]
        constant = {"job_name": "j", "ds": "d", "worker": "5"}
        assert all({**s.labels, "shard": ""} == {**constant, "shard": ""} for s in found)
        by_shard = {sample.labels.get("shard", ""): sample.value for sample in found}
        assert len(by_shard) == len(found)
        return by_shard


@pytest.fixture
def metrics() -> Clocked:
    return Clocked()


def test_a_worker_may_run_two_shards(metrics: Clocked) -> None:
    first, second = Shard(3, gpu_held_s=60.0), Shard(4, num_rows_done=1, gpu_held_s=0.0)
    with metrics.collector.watching(first):
        with metrics.collector.watching(second):
            assert metrics.values("rows_done_total") == {"3": 50, "4": 1}
            assert metrics.values("gpus") == {"3": 2, "4": 0}, "its GPUs are counted once"
            assert metrics.values("worker_shards_running") == {"": 2}
        assert metrics.values("worker_shards_running") == {"": 1}
        assert metrics.values("worker_shards_finished_total") == {"": 0}


def test_the_end_of_a_shard_is_shown_for_five_minutes(metrics: Clocked) -> None:
    metrics.run(Shard(3))
    metrics.clock += 200
    metrics.run(Shard(4))
    assert metrics.values("worker_shards_running") == {"": 0}
    metrics.clock += 100
    with metrics.collector.watching(Shard(5)):
        assert metrics.values("rows_done_total") == {"3": 100, "4": 100, "5": 50}
        assert metrics.values("computed_tokens_per_second") == {"3": 0, "4": 0, "5": 12.5}
        assert metrics.values("gpus") == {"3": 0, "4": 0, "5": 2}
        metrics.clock += 1
        assert metrics.values("rows_done_total") == {"4": 100, "5": 50}
    assert metrics.values("worker_shards_finished_total") == {"": 2}


def test_a_shard_that_is_run_again_is_shown_once_and_does_not_fall(metrics: Clocked) -> None:
    metrics.run(Shard(3), state="failed", num_rows_done=70)
    assert metrics.values("worker_shards_finished_total") == {"": 0}
    with metrics.collector.watching(Shard(3, attempt=3, num_rows_done=60)):
        assert metrics.values("rows_done_total") == {"3": 70}
        assert metrics.values("computed_tokens_per_second") == {"3": 12.5}


def test_an_attempt_that_fails_ends_too(metrics: Clocked) -> None:
    with pytest.raises(RuntimeError, match="broken"), metrics.collector.watching(Shard(3)):
        raise RuntimeError("broken")
    assert metrics.values("worker_shards_running") == {"": 0}
    assert metrics.values("rows_done_total") == {"3": 50}
