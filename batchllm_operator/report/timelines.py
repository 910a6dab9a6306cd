"""Timelines of engines: traces of their steps, read from the lake and condensed."""

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchllm_operator.errors import StorageError
from batchllm_operator.shards.attempts import ShardProgress, attempt_name
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.timeline import Timeline
from batchllm_operator.vllm_plugin.scheduler.trace import CHUNK_SIZE_KEY, TRACE_SCHEMA, in_valley

NUM_BINS: Final = 240
TOKEN_STACK: Final = (
    ("num_decode_tokens", "decode", "decode"),
    ("num_distinct_tokens", "prefill, distinct", "distinct"),
    ("num_prefix_tokens", "prefill, prefix", "prefix"),
)
"""Field of a timeline, label and colour, from below."""
VALLEY_BIN: Final = 0.5
"""A bin is shaded from this share of its time in valleys on."""
_TOKEN_FIELDS: Final = tuple(name for name, _, _ in TOKEN_STACK)
STEP_COLUMNS: Final = (
    *("start_s", *_TOKEN_FIELDS, "num_waiting", "num_preempted"),
    *("num_used_blocks", "num_held_blocks", "num_blocks"),
)
_SHORTEST_S: Final = 1e-3
"""Duration of a step if it is unknown."""
_MOST_STEPS: Final = 1_000_000
"""Earlier engines' traces beyond this are dropped; a step takes some 100 bytes of memory."""
_MOST: Final = 1 << 40
"""Upper bound of a step's counts, and of seconds since the first step."""
_log = logging.getLogger(__name__)


def read_timeline(folder: Folder, began: ShardProgress) -> Timeline | None:
    """The timeline of the engine with which a worker began an attempt in a shard's run folder.

    None if there is no trace (vLLM's own scheduler, a killed process), or, with a warning, no
    readable one.
    """
    begins, traces = f"{attempt_name(began.attempt)}/trace-", []
    try:
        paths = folder.find()
    except StorageError as error:
        _log.warning("%s: its traces aren't in the report: %s", folder.uri, error)
        return None
    for path in paths:
        if not (path.startswith(begins) and path.endswith(".parquet")):
            continue
        try:
            trace = _read_trace(folder, path)
        except (pa.ArrowException, OSError, StorageError) as error:
            _log.warning("%s/%s isn't in the report: %s", folder.uri, path, error)
        else:
            traces += [trace] if trace.num_rows else []
        while len(traces) > 1 and sum(trace.num_rows for trace in traces) > _MOST_STEPS:
            traces.pop(0)
    return _condensed(traces, began) if traces else None


def _read_trace(folder: Folder, path: str) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(folder.read_bytes(path)))
    schema = pa.schema([(name, TRACE_SCHEMA.field(name).type) for name in STEP_COLUMNS])
    if not set(STEP_COLUMNS) <= set(file.schema_arrow.names):
        raise pa.ArrowInvalid("it has other columns")
    noted = (file.schema_arrow.metadata or {}).get(CHUNK_SIZE_KEY, b"")
    if not (noted.isdigit() and len(noted) < 10):
        raise pa.ArrowInvalid("it lacks the chunk size")
    table = file.read(list(STEP_COLUMNS)).select(STEP_COLUMNS)
    table = table.cast(schema.with_metadata(table.schema.metadata))
    for name in STEP_COLUMNS if table.num_rows else ():
        values = table[name].to_numpy()  # None becomes NaN, for which comparisons are False
        if not (values.min() >= 0 and values.max() < _MOST):
            raise pa.ArrowInvalid(f"{name} has what can't be one")
    if np.any(np.diff(table["start_s"].to_numpy()) < 0):
        raise pa.ArrowInvalid("its steps aren't in order")
    return table


def _condensed(traces: Sequence[pa.Table], began: ShardProgress) -> Timeline:
    """Traces, one after the other, in at most `NUM_BINS` bins of equal length.

    The end of a last step is estimated.
    """
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in STEP_COLUMNS}
    end_s = 0.0
    for table in traces:
        start_s = table["start_s"].to_numpy()
        last_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 0.0
        for name in STEP_COLUMNS:
            parts[name].append(table[name].to_numpy())
        parts["start_s"][-1] = start_s + end_s
        end_s += float(start_s[-1]) + max(last_s, _SHORTEST_S)
    steps = {name: np.concatenate(values) for name, values in parts.items()}
    chunk_size = int(traces[-1].schema.metadata[CHUNK_SIZE_KEY])
    start_s, num_steps = steps["start_s"], len(steps["start_s"])
    edges = np.linspace(0.0, end_s, min(NUM_BINS, num_steps) + 1)
    bounds_s = np.append(start_s, end_s)
    num_blocks = np.maximum(steps["num_blocks"], 1)
    used, held = (
        _largest(np.minimum(steps[name] / num_blocks, 1.0), start_s, edges)
        for name in ("num_used_blocks", "num_held_blocks")
    )
    num_tokens = sum((steps[name] for name in _TOKEN_FIELDS), start=np.zeros(num_steps))
    is_valley = in_valley(num_tokens, steps["num_waiting"], chunk_size)
    return Timeline(
        shard_idx=began.shard_idx,
        worker=began.worker,
        num_steps=num_steps,
        duration_s=round(end_s, 3),
        chunk_size=chunk_size,
        bin_s=float(edges[1]),
        kv_used=used,
        kv_held=held,
        valley=_means(is_valley, bounds_s, edges, digits=4),
        num_valley_steps=int(np.count_nonzero(is_valley)),
        valley_share=round(float(np.diff(bounds_s)[is_valley].sum()) / end_s, 4),
        num_preempted=int(steps["num_preempted"].sum()),
        **{name: _means(steps[name], bounds_s, edges) for name in _TOKEN_FIELDS},
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
