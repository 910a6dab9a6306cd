"""Condenses the traces of a shard's engines into timelines that can be drawn."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchllm_operator.errors import StorageError
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.run_report import Timeline
from batchllm_operator.vllm_plugin.scheduler.step_row import in_valley
from batchllm_operator.vllm_plugin.scheduler.trace import CHUNK_SIZE_KEY, TRACE_SCHEMA

_log = logging.getLogger(__name__)
_NUM_BINS: Final = 240
_SHORTEST_S: Final = 1e-3
"""Duration of a step if it is unknown."""
_MOST_STEPS: Final = 1_000_000
"""Earlier engines' traces beyond this are dropped; a step takes some 100 bytes of memory."""
_MOST: Final = 1 << 40
"""Upper bound of a step's counts, and of seconds since the first step."""
_PATH: Final = re.compile(r"(?:attempt-([0-9]{5,})/)?trace-[^/]*\.parquet")
_KINDS: Final = ("num_decode_tokens", "num_distinct_tokens", "num_prefix_tokens")
_COLUMNS: Final = (
    *("start_s", *_KINDS, "num_waiting", "num_preempted"),
    *("num_used_blocks", "num_held_blocks", "num_blocks"),
)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of a shard's engines, one engine after the other."""

    columns: dict[str, NDArray[Any]]
    end_s: float
    """End of the last step, estimated like that of each engine's last step."""
    chunk_size: int | None

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        first, *others = (self.columns[name] for name in _KINDS)
        total: NDArray[np.int64] = sum(others, start=first)
        return total


def read_timeline(
    folder: Folder, shard_idx: int, *, attempt: int | None = None, worker: int | None = None
) -> Timeline | None:
    """The timeline of a shard: the steps of its engines, of all attempts, one after the other.

    With `attempt` and `worker`, it is that of the engine with which the worker began that attempt.
    None if there is no trace (vLLM's own scheduler, a killed process), or, with a warning, no
    readable one. `folder` is the shard's run folder.
    """
    try:
        names = folder.find()
    except StorageError as error:
        _log.warning("%s: its traces aren't in the report: %s", folder.uri, error)
        return None
    paths = sorted((int(match[1] or 0), match[0]) for match in map(_PATH.fullmatch, names) if match)
    if attempt is not None:
        paths = [(number, path) for number, path in paths if number == attempt]
    traces = []
    for _, path in paths:
        try:
            trace = _read_trace(folder, path)
        except (pa.ArrowException, OSError, StorageError) as error:
            _log.warning("%s/%s isn't in the report: %s", folder.uri, path, error)
        else:
            traces += [trace] if trace.num_rows else []
        while len(traces) > 1 and sum(trace.num_rows for trace in traces) > _MOST_STEPS:
            traces.pop(0)
    return _summarize(_concatenate(traces), shard_idx, worker) if traces else None


def _read_trace(folder: Folder, path: str) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(folder.read_bytes(path)))
    schema = pa.schema([(name, TRACE_SCHEMA.field(name).type) for name in _COLUMNS])
    if not set(_COLUMNS) <= set(file.schema_arrow.names):
        raise pa.ArrowInvalid("it has other columns")
    table = file.read(list(_COLUMNS)).select(_COLUMNS)
    table = table.cast(schema.with_metadata(table.schema.metadata))
    for name in _COLUMNS if table.num_rows else ():
        values = table[name].to_numpy()  # None becomes NaN, for which comparisons are False
        if not (values.min() >= 0 and values.max() < _MOST):
            raise pa.ArrowInvalid(f"{name} has what can't be one")
    if np.any(np.diff(table["start_s"].to_numpy()) < 0):
        raise pa.ArrowInvalid("its steps aren't in order")
    return table


def _concatenate(traces: Sequence[pa.Table]) -> _Steps:
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
    before_s, chunk_sizes = 0.0, []
    for table in traces:
        start_s = table["start_s"].to_numpy()
        last_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 0.0
        last_s = max(last_s, _SHORTEST_S)
        for name in _COLUMNS[1:]:
            parts[name].append(table[name].to_numpy())
        parts["start_s"].append(start_s + before_s)
        before_s += float(start_s[-1]) + last_s
        noted = (table.schema.metadata or {}).get(CHUNK_SIZE_KEY, b"")
        chunk_sizes.append(int(noted) if noted.isdigit() and len(noted) < 10 else None)
    columns = {name: np.concatenate(each) for name, each in parts.items()}
    return _Steps(columns, before_s, chunk_sizes[-1])


def _summarize(steps: _Steps, shard_idx: int, worker: int | None) -> Timeline:
    columns, duration_s = steps.columns, steps.end_s
    start_s, num_steps = columns["start_s"], len(columns["start_s"])
    edges = np.linspace(0.0, duration_s, min(_NUM_BINS, num_steps) + 1)
    num_blocks = np.maximum(columns["num_blocks"], 1)
    used, held = (
        np.minimum(columns[name] / num_blocks, 1.0)
        for name in ("num_used_blocks", "num_held_blocks")
    )
    limit = steps.chunk_size or int(steps.num_tokens.max())
    is_valley = in_valley(steps.num_tokens, columns["num_waiting"], limit)
    bounds_s = np.append(start_s, duration_s)
    return Timeline(
        shard_idx=shard_idx,
        worker=worker,
        num_steps=num_steps,
        duration_s=round(duration_s, 3),
        chunk_size=steps.chunk_size,
        bin_s=float(edges[1]),
        kv_used=_largest(used, start_s, edges),
        kv_held=_largest(held, start_s, edges),
        valley=_means(is_valley, bounds_s, edges, digits=4),
        num_valley_steps=int(np.count_nonzero(is_valley)),
        valley_share=round(float(np.diff(bounds_s)[is_valley].sum()) / duration_s, 4),
        num_preempted=int(columns["num_preempted"].sum()),
        **{name: _means(columns[name], bounds_s, edges) for name in _KINDS},
    )


def _means(
    values: NDArray[Any], bounds_s: NDArray[np.float64], edges: NDArray[np.float64], digits: int = 1
) -> tuple[float, ...]:
    before = np.append(0.0, np.cumsum(values * np.diff(bounds_s)))
    means = np.diff(np.interp(edges, bounds_s, before)) / np.diff(edges)
    return tuple(np.round(means, digits).tolist())


def _largest(
    values: NDArray[np.float64], start_s: NDArray[np.float64], edges: NDArray[np.float64]
) -> tuple[float, ...]:
    num_bins = len(edges) - 1
    running = np.maximum(np.searchsorted(start_s, edges[:-1], "right") - 1, 0)
    largest = values[running]
    bins = np.clip(np.searchsorted(edges, start_s, "right") - 1, 0, num_bins - 1)
    np.maximum.at(largest, bins, values)
    return tuple(np.round(largest, 4).tolist())
