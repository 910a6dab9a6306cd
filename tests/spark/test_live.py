"""Progress by the tasks of Spark's stages."""

from __future__ import annotations

import io
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from batchllm_operator.progress import Progress
from batchllm_operator.spark import tasks

NO_CONTEXT: Any = SimpleNamespace()
"""A session of Spark Connect."""


class Stages:
    """Two stages, of which one more task has ended at each look; the first is tried again."""

    def __init__(self) -> None:
        self.looks = 0
        self.seen_all = threading.Event()
        tracker = SimpleNamespace(getActiveStageIds=self.active, getStageInfo=self.info)
        context = SimpleNamespace(statusTracker=lambda: tracker)
        self.session: Any = SimpleNamespace(sparkContext=context)

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
    stream, stages = io.StringIO(), Stages()
    with Progress("plan", 8, unit="tasks", stream=stream, line_interval_s=0) as progress:
        with tasks.counted(stages.session, progress, 4, "write shards"):
            stages.seen_all.wait(60)
        assert progress.line().startswith("plan: 4/8 tasks (50 %)")
    counts = [int(line.split("/")[0].split()[-1]) for line in stream.getvalue().splitlines()[1:]]
    assert counts == sorted(counts)
    assert {0, 1, 2, 3, 4} <= set(counts) <= set(range(5))


@pytest.mark.parametrize("error", [None, ValueError("of the job")])
def test_without_a_context_only_an_end_without_error_counts(error: Exception | None) -> None:
    stream = io.StringIO()
    with (
        suppress(ValueError),
        Progress("plan", 4, unit="tasks", stream=stream, line_interval_s=0) as progress,
        tasks.counted(NO_CONTEXT, progress, 4, "choose ranges"),
    ):
        if error:
            raise error
    first, *_, last = stream.getvalue().splitlines()[1:]
    assert first.startswith("plan: 0/4 tasks (0 %), choose ranges")
    assert last.startswith("plan: 0/4 tasks" if error else "plan: 4/4 tasks (100 %)")
