"""The progress of Spark's tasks, as Spark tells of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from batchllm_operator.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S: Final = 1.0


@contextmanager
def counted(spark: SparkSession, progress: Progress, num_tasks: int, note: str) -> Iterator[None]:
    """Advances `progress` by the context's tasks as they end, in the end by all of them.

    Spark Connect doesn't tell, and of a session that others use, too, all tasks count.

    Args:
        num_tasks: those that the context will run; Spark adds a few of its own.
        note: what they do.
    """
    seen = _Seen(progress, num_tasks, note)
    try:
        tracker: Any = spark.sparkContext.statusTracker()
    except Exception:  # noqa: BLE001 - an error of Spark Connect's own, as it has no context
        tracker = None
    stop = threading.Event()

    def watch() -> None:
        with suppress(Exception):  # the context meets it, too
            while tracker is not None and not stop.wait(_POLL_S):
                seen.look(tracker)

    progress.advance(0, note)
    watcher = threading.Thread(target=watch, name="batchllm-spark-tasks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    seen.complete()


class _Seen:
    """The tasks of some stages that have ended, by stage."""

    def __init__(self, progress: Progress, num_tasks: int, note: str) -> None:
        self._progress, self._num_tasks, self._note = progress, num_tasks, note
        self._ended: dict[int, int] = {}
        self._num_shown = 0

    def look(self, tracker: Any) -> None:
        for stage in {*self._ended, *tracker.getActiveStageIds()}:
            if (info := tracker.getStageInfo(stage)) is not None:  # of its last attempt
                self._ended[stage] = max(info.numCompletedTasks, self._ended.get(stage, 0))
        self._show(min(sum(self._ended.values()), self._num_tasks))

    def complete(self) -> None:
        self._show(self._num_tasks)

    def _show(self, num_ended: int) -> None:
        self._progress.advance(num_ended - self._num_shown, self._note)
        self._num_shown = num_ended
