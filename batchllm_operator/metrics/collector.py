"""The progress of shards as metric families, created at each scrape."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchllm_operator.shards.progress import LIVE_STATES, ShardProgress, State

Snapshot = Callable[[], ShardProgress]
"""Returns a shard's current progress; called in a thread of the endpoint."""

_KEPT_S: Final = 300.0
"""Prometheus looks back as far for a sample, by default."""
_log = logging.getLogger(__name__)
_Value = Callable[[ShardProgress], float | None]
_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily)

# Name without `_total`, help text, value.
_COUNTERS: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("rows_done", "Rows with a text or an error.", lambda p: p.done.num_rows),
    ("rows_failed", "Of them, rows with an error.", lambda p: p.done.num_failed_rows),
    ("parts_done", "Parts that are written.", lambda p: p.num_parts_done),
    (
        "logical_tokens",
        "Prompt tokens of the rows with a text, duplicates included.",
        lambda p: p.done.num_logical_tokens,
    ),
    (
        "prompt_tokens",
        "Prompt tokens of the requests that got a text.",
        lambda p: p.done.num_prompt_tokens,
    ),
    (
        "cached_tokens",
        "Of them, tokens that were found in the cache.",
        lambda p: p.done.num_cached_tokens,
    ),
    ("output_tokens", "Generated tokens.", lambda p: p.done.num_output_tokens),
)


def _while_live(speed: float, progress: ShardProgress) -> float:
    return speed if progress.state in LIVE_STATES else 0.0


def _num_gpus(progress: ShardProgress) -> int:
    """A worker's two open shards have the same GPUs, which count for the earlier one."""
    is_holding = progress.state in LIVE_STATES and progress.gpu_held_s != 0
    return progress.num_gpus if is_holding else 0


_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("shard_rows", "Rows of the shard.", lambda p: p.num_rows),
    ("shard_parts", "Parts of the shard.", lambda p: p.num_parts),
    (
        "saving_ratio",
        "Share of the logical prompt tokens that wasn't computed, 0 to 1.",
        lambda p: p.done.saving_ratio or 0.0,
    ),
    (
        "computed_tokens_per_second",
        "Prompt tokens that this attempt computes per second, without cached ones, over the last"
        " minute; 0 once it has ended.",
        lambda p: _while_live(p.computed_tokens_per_s, p),
    ),
    (
        "output_tokens_per_second",
        "Output tokens of this attempt per second, over the last minute; 0 once it has ended.",
        lambda p: _while_live(p.output_tokens_per_s, p),
    ),
    ("eta_seconds", "Until the last row; absent while unknown.", lambda p: p.eta_s),
    ("elapsed_seconds", "From the attempt's start, until it ends.", lambda p: p.elapsed_s),
    (
        "engine_start_seconds",
        "Of elapsed_seconds, until the engine took requests.",
        lambda p: p.engine_start_s,
    ),
    (
        "gpus",
        "GPUs that the attempt holds; 0 once it has ended, or as long as a worker only feeds it.",
        _num_gpus,
    ),
)


class ShardCollector(Collector):
    """Creates the metric families of a process's attempts at shards, at each scrape.

    A worker has one attempt after another, and sometimes two at once. The last state of an ended
    one is shown for five minutes more, so that it is scraped.

    An attempt that fails may lose rows that it couldn't store, but a falling counter would look
    like a restart, so counters never fall here.

    Every sample has the labels `job_name` (`job` is Prometheus's own), `ds` and `worker`, a shard's
    also `shard`.

    Args:
        job: the spec's name.
        ds: the partition.
        worker: the worker's number.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, job: str, ds: str, worker: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._labels = {"job_name": job, "ds": ds, "worker": str(worker)}
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[Snapshot] = []
        self._ended: list[tuple[float, ShardProgress]] = []
        """Last states of ended attempts, and when they ended."""
        self._num_finished = 0
        self._highest: dict[tuple[int, str], float] = {}

    @contextmanager
    def watching(self, snapshot: Snapshot) -> Iterator[None]:
        """Show an attempt while the context is open, and its last state for five minutes more."""
        with self._lock:
            self._open.append(snapshot)
        try:
            yield
        finally:
            self._end(snapshot)

    def _end(self, snapshot: Snapshot) -> None:
        last = None
        try:
            last = snapshot()
        # Any error: metrics never stop a run.
        except Exception as error:  # noqa: BLE001
            _log.warning("the metrics lack a shard's end: %s", error)
        with self._lock:
            self._open.remove(snapshot)
            if last is not None:
                self._ended.append((self._clock(), last))
                self._num_finished += last.state == "finished"

    def collect(self) -> Iterator[Metric]:
        shards = self._progress()
        for name, text, value_of in _COUNTERS:
            counter = self._family(CounterMetricFamily, name, text, "shard")
            for progress in shards:
                key = progress.shard_idx, name
                value = max(value_of(progress) or 0, self._highest.get(key, 0))
                self._highest[key] = value
                counter.add_metric(self._values(progress.shard_idx), value)
            yield counter
        for name, text, value_of in _GAUGES:
            gauge = self._family(GaugeMetricFamily, name, text, "shard")
            for progress in shards:
                if (now := value_of(progress)) is not None:
                    gauge.add_metric(self._values(progress.shard_idx), now)
            yield gauge
        text = "1 for the state that the attempt is in, else 0."
        states = self._family(GaugeMetricFamily, "shard_state", text, "shard", "state")
        info = self._family(InfoMetricFamily, "shard", "Plan and attempt; always 1.", "shard")
        for progress in shards:
            for state in get_args(State):
                values = self._values(progress.shard_idx, state)
                states.add_metric(values, float(progress.state == state))
            of_attempt = {"plan_id": progress.plan_id, "attempt": str(progress.attempt)}
            info.add_metric(self._values(progress.shard_idx), of_attempt)
        yield states
        yield info
        text = "Shards that the worker has finished."
        finished = self._family(CounterMetricFamily, "worker_shards_finished", text)
        finished.add_metric(self._values(), self._num_finished)
        yield finished
        text = "Shards that the worker runs: two while it feeds one before the last has ended."
        running = self._family(GaugeMetricFamily, "worker_shards_running", text)
        running.add_metric(self._values(), len(self._open))
        yield running

    def _progress(self) -> Sequence[ShardProgress]:
        """The state of each shard, by its latest attempt here."""
        with self._lock:
            oldest = self._clock() - _KEPT_S
            self._ended = [ended for ended in self._ended if ended[0] >= oldest]
            ended, live = [progress for _, progress in self._ended], list(self._open)
        latest = [*ended, *(snapshot() for snapshot in live)]
        return list({progress.shard_idx: progress for progress in latest}.values())

    def _family(self, kind: type[_Family], name: str, text: str, *more: str) -> _Family:
        """A family whose samples have the labels `more`; `_values` has theirs in this order."""
        return kind(f"batchllm_{name}", text, labels=[*self._labels, *more])

    def _values(self, *more: object) -> list[str]:
        return [*self._labels.values(), *map(str, more)]
