"""What a process's metrics say about its shards, and that the reference lists all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
from site_pages import reference
from support.shard_progress import shard_progress

from batchllm_operator.metrics import ShardCollector
from batchllm_operator.shards.attempts import ShardProgress

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
TEXT = PAGE.read_text(encoding="utf-8")


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


# The document


def test_what_prometheus_gets_is_listed_by_its_name_and_type() -> None:
    listed = dict(
        re.findall(r"^\| `(batchllm_\w+)` \| (\w+) \|", reference.metrics(), re.MULTILINE)
    )
    collector = ShardCollector(job="j", ds="d", worker=5)
    with collector.watching(lambda: shard_progress(worker=5)):
        families = list(collector.collect())
    assert listed == {sample.name: family.type for family in families for sample in family.samples}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in listed.items())
    for family in families:
        constant = {"job_name", "ds", "worker"}
        if not family.name.startswith("batchllm_worker_"):
            constant.add("shard")
        for sample in family.samples:
            assert sample.labels.keys() >= constant
            assert all(f"`{label}`" in TEXT for label in sample.labels)


def test_queries_name_what_there_is() -> None:
    shown = "\n".join(line for line in TEXT.splitlines() if line.startswith("    "))
    named = set(re.findall(r"batchllm_\w+", shown))
    assert named and all(f"| `{name}` |" in reference.metrics() for name in named)


def test_what_airflow_gets_is_listed() -> None:
    metrics = pytest.importorskip("batchllm_operator.operators.metrics")
    for stage, sent in metrics.STAGE_METRICS.items():
        [row] = re.findall(rf"^\| `batchllm.{stage}` \|(.*)\|(.*)\|$", TEXT, re.MULTILINE)
        counters, others = (re.findall(r"`(\w+)`", cell) for cell in row)
        prefix = f"batchllm.{stage}."
        assert [f"{prefix}{name}" for name in counters + others] == [each.name for each in sent]
        assert {each.kind for each in sent[: len(counters)]} == {"counter"}
        assert all(each.kind in row[1] for each in sent[len(counters) :])
    assert f"`{metrics.JOB_TAG}` and `{metrics.DAG_TAG}`" in TEXT
