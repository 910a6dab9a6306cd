"""Reads the traces that a shard's engines leave."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchllm_operator.errors import StorageError
from batchllm_operator.report.timelines import STEP_COLUMNS, condense
from batchllm_operator.shards.attempts import attempt_name
from batchllm_operator.shards.progress import ShardProgress
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.run_report import Timeline
from batchllm_operator.vllm_plugin.scheduler.trace import CHUNK_SIZE_KEY, TRACE_SCHEMA

_log = logging.getLogger(__name__)
_SHORTEST_S: Final = 1e-3
"""Duration of a step if it is unknown."""
_MOST_STEPS: Final = 1_000_000
"""Earlier engines' traces beyond this are dropped; a step takes some 100 bytes of memory."""
_MOST: Final = 1 << 40
"""Upper bound of a step's counts, and of seconds since the first step."""


def read_timeline(folder: Folder, began: ShardProgress) -> Timeline | None:
    """The timeline of the engine with which a worker began this attempt.

    None if there is no trace (vLLM's own scheduler, a killed process), or, with a warning, no
    readable one. `folder` is the shard's run folder.
    """
    try:
        names = folder.find()
    except StorageError as error:
        _log.warning("%s: its traces aren't in the report: %s", folder.uri, error)
        return None
    begins = f"{attempt_name(began.attempt)}/trace-"
    paths = sorted(path for path in names if path.startswith(begins) and path.endswith(".parquet"))
    traces = []
    for path in paths:
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
    """The timeline of traces, one after the other; the end of a last step is estimated."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in STEP_COLUMNS}
    before_s = 0.0
    for table in traces:
        start_s = table["start_s"].to_numpy()
        last_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 0.0
        for name in STEP_COLUMNS:
            parts[name].append(table[name].to_numpy())
        parts["start_s"][-1] = start_s + before_s
        before_s += float(start_s[-1]) + max(last_s, _SHORTEST_S)
    steps = {name: np.concatenate(values) for name, values in parts.items()}
    chunk_size = int(traces[-1].schema.metadata[CHUNK_SIZE_KEY])
    return condense(steps, before_s, chunk_size, shard_idx=began.shard_idx, worker=began.worker)
