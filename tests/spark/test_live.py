"""Progress by the tasks of Spark's stages."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from batchllm_operator.progress import Progress
from batchllm_operator.spark import tasks


class Stages:
    """Two stages, of which one more task has ended at each look; the first is tried again."""

    def __init__(self) -> None:
        self.looks = 0
        self.seen_all = threading.Event()

    def session(self) -> Any:
        tracker = SimpleNamespace(getActiveStageIds=self.active, getStageInfo=self.info)
        return SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))

    def active(self) -> list[int]:
        self.looks += 1
        if self.looks > 5:
            self.seen_all.set()
        return [1] if self.looks < 3 else [2]

    def info(self, stage: int) -> Any:
        ended = [0, 1, 2, 0, 0, 0][min(self.looks, 5)] if stage == 1 else self.looks - 2
        return SimpleNamespace(numCompletedTasks=ended) if ended < 9 else None


def test_tasks_count_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_POLL_S", 0.001)
    stream = io.StringIO()
    stages = Stages()
    with Progress("plan", 8, unit="tasks", stream=stream, line_interval_s=0) as progress:
        with tasks.counted(stages.session(), progress, 4, "write shards"):
            stages.seen_all.wait(60)
        assert progress.line().startswith("plan: 4/8 tasks (50 %)")
    counts = [int(line.split("/")[0].split()[-1]) for line in stream.getvalue().splitlines()[1:]]
    assert counts == sorted(counts)
    assert {0, 1, 2, 3, 4} <= set(counts) <= set(range(5))


def test_without_a_context_only_the_end_counts() -> None:
    """As on Spark Connect."""
    stream = io.StringIO()
    without: Any = SimpleNamespace()
    with (
        Progress("plan", 4, unit="tasks", stream=stream, line_interval_s=0) as progress,
        tasks.counted(without, progress, 4, "choose ranges"),
    ):
        pass
    assert stream.getvalue().splitlines()[1].startswith("plan: 0/4 tasks (0 %), choose ranges")
    assert stream.getvalue().splitlines()[-1].startswith("plan: 4/4 tasks (100 %)")


def test_an_error_leaves_the_count_as_it_is() -> None:
    stream = io.StringIO()
    without: Any = SimpleNamespace()
    with (
        pytest.raises(ValueError, match="of the job"),
        Progress("plan", 4, unit="tasks", stream=stream) as progress,
        tasks.counted(without, progress, 4, "choose ranges"),
    ):
        raise ValueError("of the job")
    assert stream.getvalue().splitlines()[-1].startswith("plan: 0/4 tasks")
