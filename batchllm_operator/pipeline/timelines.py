"""What the traces of a shard's engines say, in few enough numbers to be drawn."""

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
from batchllm_operator.lake import Folder
from batchllm_operator.report.run_report import Timeline
from batchllm_operator.vllm_plugin.trace import CHUNK_SIZE_KEY

_log = logging.getLogger(__name__)
_NUM_BINS: Final = 240
_VALLEY: Final = 0.5
"""Of the chunk size: a step below it, while requests wait, is a valley."""
_MOST_STEPS: Final = 1_000_000
"""Of which earlier engines' traces are read, too; some 100 bytes of memory each."""
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
    ends_s: NDArray[np.float64]
    """When the next step began; of an engine's last one, a guess."""
    chunk_size: int | None

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        first, *others = (self.columns[name] for name in _KINDS)
        total: NDArray[np.int64] = sum(others, start=first)
        return total


def read_timeline(folder: Folder, shard_idx: int) -> Timeline | None:
    """The timeline of a shard: the steps of all its engines, of all attempts, one after the other.

    None if it left no trace (vLLM's own scheduler, a killed process), or none that can be read;
    a warning says so.

    Args:
        folder: the shard's run folder.
        shard_idx: which shard it is.
    """
    paths = sorted(
        (int(match[1] or 0), match[0]) for match in map(_PATH.fullmatch, folder.find()) if match
    )
    traces: list[pq.ParquetFile] = []
    for _, path in paths:
        try:
            trace = pq.ParquetFile(pa.BufferReader(folder.read_bytes(path)))
            if not set(_COLUMNS) <= set(trace.schema_arrow.names):
                raise pa.ArrowInvalid("it has other columns")
            traces.append(trace)
        except (pa.ArrowException, OSError, StorageError) as error:
            _log.warning("%s/%s isn't in the report: %s", folder.uri, path, error)
    while len(traces) > 1 and sum(trace.metadata.num_rows for trace in traces) > _MOST_STEPS:
        traces.pop(0)
    steps = _concatenate([trace for trace in traces if trace.metadata.num_rows])
    return None if steps is None else _summarize(steps, shard_idx)


def _concatenate(traces: Sequence[pq.ParquetFile]) -> _Steps | None:
    if not traces:
        return None
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
    ends: list[NDArray[np.float64]] = []
    before_s, chunk_sizes = 0.0, []
    for trace in traces:
        table = trace.read(list(_COLUMNS))
        start_s = table["start_s"].to_numpy()
        last_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 0.0
        for name in _COLUMNS[1:]:
            parts[name].append(table[name].to_numpy())
        parts["start_s"].append(start_s + before_s)
        ends.append(np.append(start_s[1:], start_s[-1] + last_s) + before_s)
        before_s = float(ends[-1][-1])
        noted = (trace.schema_arrow.metadata or {}).get(CHUNK_SIZE_KEY, b"")
        chunk_sizes.append(int(noted) if noted.isdigit() else None)
    columns = {name: np.concatenate(each) for name, each in parts.items()}
    return _Steps(columns, np.concatenate(ends), chunk_sizes[-1])


def _summarize(steps: _Steps, shard_idx: int) -> Timeline:
    columns, num_steps = steps.columns, len(steps.ends_s)
    duration_s = max(float(steps.ends_s[-1]), 1e-6)
    num_bins = min(_NUM_BINS, num_steps)
    bin_s = duration_s / num_bins
    bins = np.minimum((columns["start_s"] / bin_s).astype(np.int64), num_bins - 1)
    used = columns["num_used_blocks"] / np.maximum(columns["num_blocks"], 1)
    held = columns["num_held_blocks"] / np.maximum(columns["num_blocks"], 1)
    limit = steps.chunk_size or int(steps.num_tokens.max())
    in_valley = (steps.num_tokens < _VALLEY * limit) & (columns["num_waiting"] > 0)
    step_s = steps.ends_s - columns["start_s"]
    means = {name: _filled(_means(columns[name], bins, num_bins), bins) for name in _KINDS}
    return Timeline(
        shard_idx=shard_idx,
        num_steps=num_steps,
        duration_s=round(duration_s, 3),
        chunk_size=steps.chunk_size,
        bin_s=bin_s,
        kv_used=_filled(_largest(used, bins, num_bins), bins, digits=4),
        kv_held=_filled(_largest(held, bins, num_bins), bins, digits=4),
        num_valley_steps=int(np.count_nonzero(in_valley)),
        valley_share=round(float(step_s[in_valley].sum()) / duration_s, 4),
        num_preempted=int(columns["num_preempted"].sum()),
        **means,
    )


def _means(
    values: NDArray[np.int64], bins: NDArray[np.int64], num_bins: int
) -> NDArray[np.float64]:
    counts = np.bincount(bins, minlength=num_bins)
    sums = np.bincount(bins, weights=values, minlength=num_bins)
    return np.asarray(sums / np.maximum(counts, 1), dtype=np.float64)


def _largest(
    values: NDArray[np.float64], bins: NDArray[np.int64], num_bins: int
) -> NDArray[np.float64]:
    largest = np.zeros(num_bins)
    np.maximum.at(largest, bins, values)
    return largest


def _filled(
    values: NDArray[np.float64], bins: NDArray[np.int64], digits: int = 1
) -> tuple[float, ...]:
    """Bins in which no step began take what the step before them has: it still runs."""
    has_steps = np.zeros(len(values), dtype=bool)
    has_steps[bins] = True
    latest = np.maximum.accumulate(np.where(has_steps, np.arange(len(values)), 0))
    return tuple(np.round(values[latest], digits).tolist())
