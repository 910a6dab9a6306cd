"""The progress of a process's shards as Prometheus metrics, and the endpoint that serves them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar, get_args

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchllm_operator.shards.attempts import LIVE_STATES, ShardProgress, State

ADDRESS_VARIABLE: Final = "BATCHLLM_METRICS_PORT"
"""Environment variable with the address, for `batchllm run` without `--metrics-port`."""
_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")
_KEPT_S: Final = 300.0
"""Prometheus looks back as far for a sample, by default."""
_log = logging.getLogger(__name__)

Snapshot = Callable[[], ShardProgress]
"""Returns a shard's current progress; called in a thread of the endpoint."""
_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily)

# Help texts by name, without `_total`.
_COUNTERS: Final = {
    "rows_done": "Rows with a text or an error.",
    "rows_failed": "Of them, rows with an error.",
    "parts_done": "Parts that are written.",
    "logical_tokens": "Prompt tokens of the rows with a text, duplicates included.",
    "prompt_tokens": "Prompt tokens of the requests that got a text.",
    "cached_tokens": "Of them, tokens that were found in the cache.",
    "output_tokens": "Generated tokens.",
}
_GAUGES: Final = {
    "shard_rows": "Rows of the shard.",
    "shard_parts": "Parts of the shard.",
    "saving_ratio": "Share of the logical prompt tokens that wasn't computed, 0 to 1.",
    "computed_tokens_per_second": "Prompt tokens that this attempt computes per second, without"
    " cached ones, over the last minute; 0 once it has ended.",
    "output_tokens_per_second": "Output tokens of this attempt per second, over the last minute; 0"
    " once it has ended.",
    "eta_seconds": "Until the last row; absent while unknown.",
    "elapsed_seconds": "From the attempt's start, until it ends.",
    "engine_start_seconds": "Of elapsed_seconds, until the engine took requests.",
    "gpus": "GPUs that the attempt holds; 0 once it has ended, or as long as a worker only feeds"
    " it.",
}


def _values_of(progress: ShardProgress) -> Mapping[str, float | None]:
    """The values of `_COUNTERS` and `_GAUGES`."""
    done, is_live = progress.done, progress.state in LIVE_STATES
    return {
        "rows_done": done.num_rows,
        "rows_failed": done.num_failed_rows,
        "parts_done": progress.num_parts_done,
        "logical_tokens": done.num_logical_tokens,
        "prompt_tokens": done.num_prompt_tokens,
        "cached_tokens": done.num_cached_tokens,
        "output_tokens": done.num_output_tokens,
        "shard_rows": progress.num_rows,
        "shard_parts": progress.num_parts,
        "saving_ratio": done.saving_ratio or 0.0,
        "computed_tokens_per_second": progress.computed_tokens_per_s if is_live else 0.0,
        "output_tokens_per_second": progress.output_tokens_per_s if is_live else 0.0,
        "eta_seconds": progress.eta_s,
        "elapsed_seconds": progress.elapsed_s,
        "engine_start_seconds": progress.engine_start_s,
        # A worker's two open shards have the same GPUs, which count for the earlier one.
        "gpus": progress.num_gpus if is_live and progress.gpu_held_s else 0,
    }


class ShardCollector(Collector):
    """Creates the metric families of a process's attempts at shards, at each scrape.

    A worker has one attempt after another, and sometimes two at once. The last state of an ended
    one is shown for five minutes more, so that it is scraped. An attempt that fails may lose rows
    that it couldn't store, but a falling counter would look like a restart, so counters never fall.

    Every sample has the labels `job_name` (`job` is Prometheus's own), `ds` and `worker`, a shard's
    also `shard`. The clock gives monotonic seconds.
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
        values = {progress.shard_idx: _values_of(progress) for progress in shards}
        for name, text in _COUNTERS.items():
            counter = self._family(CounterMetricFamily, name, text, "shard")
            for shard_idx, of_shard in values.items():
                value = max(of_shard[name] or 0, self._highest.get((shard_idx, name), 0))
                self._highest[shard_idx, name] = value
                counter.add_metric(self._values(shard_idx), value)
            yield counter
        for name, text in _GAUGES.items():
            gauge = self._family(GaugeMetricFamily, name, text, "shard")
            for shard_idx, of_shard in values.items():
                if (now := of_shard[name]) is not None:
                    gauge.add_metric(self._values(shard_idx), now)
            yield gauge
        text = "1 for the state that the attempt is in, else 0."
        states = self._family(GaugeMetricFamily, "shard_state", text, "shard", "state")
        info = self._family(InfoMetricFamily, "shard", "Plan and attempt; always 1.", "shard")
        for progress in shards:
            for state in get_args(State):
                labels = self._values(progress.shard_idx, state)
                states.add_metric(labels, float(progress.state == state))
            of_attempt = {"plan_id": progress.plan_id, "attempt": str(progress.attempt)}
            info.add_metric(self._values(progress.shard_idx), of_attempt)
        yield from (states, info)
        text = "Shards that the worker has finished."
        finished = self._family(CounterMetricFamily, "worker_shards_finished", text)
        finished.add_metric(self._values(), self._num_finished)
        text = "Shards that the worker runs: two while it feeds one before the last has ended."
        running = self._family(GaugeMetricFamily, "worker_shards_running", text)
        running.add_metric(self._values(), len(self._open))
        yield from (finished, running)

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


class MetricsAddress(NamedTuple):
    """An address to listen on."""

    host: str
    """0.0.0.0 for all IPv4 addresses of the machine, :: for all of IPv6."""
    port: int

    @classmethod
    def parse(cls, text: str) -> MetricsAddress | None:
        """Parse `[HOST:]PORT`, with an IPv6 HOST in brackets, or raise ValueError.

        None for an empty text or port 0. Without a host, only this machine can read the metrics.
        """
        if not text:
            return None
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(
                f"{text!r} isn't [HOST:]PORT with a port from 1 to 65535, such as 9400 or"
                " 0.0.0.0:9400; 0 is for none"
            )
        port = int(match["port"])
        return cls((match["host"] or "127.0.0.1").strip("[]"), port) if port else None

    def beside(self, number: int) -> MetricsAddress:
        """The address whose port is higher by `number`."""
        return MetricsAddress(self.host, self.port + number)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@contextmanager
def serving_metrics(
    address: MetricsAddress | None, collector: ShardCollector
) -> Iterator[MetricsAddress | None]:
    """Serve GET /metrics from daemon threads within the context; yields the address, None for none.

    The collector is called at each scrape, in a thread. Metrics never stop a run: if the address
    (port 0 for any free one) can't be used, a warning is logged and nothing is served.
    """
    if address is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)  # no collection before the first scrape
    registry.register(collector)
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    # UnicodeError: an invalid host name; RuntimeError: too many threads.
    except (OSError, UnicodeError, RuntimeError) as error:
        _log.warning("no metrics: can't listen on %s: %s", address, error)
        yield None
        return
    served = MetricsAddress(address.host, server.server_port)
    _log.info("metrics: http://%s/metrics", served)
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
