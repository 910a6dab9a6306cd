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
    try:
        tracker: Any = spark.sparkContext.statusTracker()
    except Exception:  # noqa: BLE001 - an error of Spark Connect's own, as it has no context
        tracker = None
    stop = threading.Event()
    num_shown, ended = 0, dict[int, int]()  # by stage

    def show(num_ended: int) -> None:
        nonlocal num_shown
        progress.advance(num_ended - num_shown, note)
        num_shown = num_ended

    def watch() -> None:
        with suppress(Exception):  # the context meets it, too
            while tracker is not None and not stop.wait(_POLL_S):
                for stage in {*ended, *tracker.getActiveStageIds()}:
                    if (info := tracker.getStageInfo(stage)) is not None:  # of its last attempt
                        ended[stage] = max(info.numCompletedTasks, ended.get(stage, 0))
                show(min(sum(ended.values()), num_tasks))

    show(0)
    watcher = threading.Thread(target=watch, name="batchllm-spark-tasks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    show(num_tasks)
