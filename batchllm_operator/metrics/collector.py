"""The progress of a shard as metric families, created at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchllm_operator.artifacts.shard_progress import ShardProgress, State

Snapshot = Callable[[], ShardProgress]
"""Returns the shard's current progress; called in a thread of the endpoint."""

_Value = Callable[[ShardProgress], float | None]

# Name without `_total`, help text, value.
_COUNTERS: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("rows_done", "Rows with a text or an error.", lambda p: p.num_rows_done),
    ("rows_failed", "Of them, rows with an error.", lambda p: p.num_rows_failed),
    ("parts_done", "Parts that are written.", lambda p: p.num_parts_done),
    (
        "logical_tokens",
        "Prompt tokens of the rows with a text, duplicates included.",
        lambda p: p.num_logical_tokens,
    ),
    (
        "prompt_tokens",
        "Prompt tokens of the requests that got a text.",
        lambda p: p.num_prompt_tokens,
    ),
    (
        "cached_tokens",
        "Of them, tokens that were found in the cache.",
        lambda p: p.num_cached_tokens,
    ),
    ("output_tokens", "Generated tokens.", lambda p: p.num_output_tokens),
)
_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("shard_rows", "Rows of the shard.", lambda p: p.num_rows),
    ("shard_parts", "Parts of the shard.", lambda p: p.num_parts),
    (
        "saving_ratio",
        "Share of the logical prompt tokens that wasn't computed, 0 to 1.",
        lambda p: p.saving_ratio,
    ),
    (
        "tokens_per_second",
        "Prompt and output tokens of this attempt per second, over the last minute.",
        lambda p: p.tokens_per_s,
    ),
    ("eta_seconds", "Until the last row; absent while unknown.", lambda p: p.eta_s),
    ("elapsed_seconds", "Since the attempt's start.", lambda p: p.elapsed_s),
    (
        "engine_start_seconds",
        "Of elapsed_seconds, until the engine took requests.",
        lambda p: p.engine_start_s,
    ),
    ("gpus", "GPUs that the attempt holds.", lambda p: p.num_gpus),
)


class ShardCollector(Collector):
    """Creates the metric families of one attempt at a shard, at each scrape.

    A stopped attempt loses the rows of open parts, but a falling counter would look like a restart,
    so counters never fall here.

    Every sample has the labels `job_name`, `ds` and `shard`. (`job` is Prometheus's own.)
    """

    def __init__(self, snapshot: Snapshot, *, job: str, ds: str) -> None:
        self._snapshot, self._job, self._ds = snapshot, job, ds
        self._highest: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        progress = self._snapshot()
        labels = {"job_name": self._job, "ds": self._ds, "shard": str(progress.shard_idx)}
        for name, text, value_of in _COUNTERS:
            counter = CounterMetricFamily(f"batchllm_{name}", text, labels=list(labels))
            value = max(value_of(progress) or 0, self._highest.get(name, 0))
            self._highest[name] = value
            counter.add_metric(list(labels.values()), value)
            yield counter
        for name, text, value_of in _GAUGES:
            now = value_of(progress)
            gauge = GaugeMetricFamily(f"batchllm_{name}", text, labels=list(labels))
            if now is not None:
                gauge.add_metric(list(labels.values()), now)
            yield gauge
        yield _state(progress, labels)
        info = InfoMetricFamily(
            "batchllm_shard", "Plan and attempt; always 1.", labels=list(labels)
        )
        info.add_metric(
            list(labels.values()), {"plan_id": progress.plan_id, "attempt": str(progress.attempt)}
        )
        yield info


def _state(progress: ShardProgress, labels: dict[str, str]) -> Metric:
    """A sample per state: 1 for the attempt's, 0 for the others."""
    family = GaugeMetricFamily(
        "batchllm_shard_state",
        "1 for the state that the attempt is in, else 0.",
        labels=[*labels, "state"],
    )
    for state in get_args(State):
        family.add_metric([*labels.values(), state], float(progress.state == state))
    return family
