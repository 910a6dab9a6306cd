"""Files of shards: requests in plan order, a row group for each part."""

from collections.abc import Callable, Generator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.prefixes.prompt_store import read_ahead
from batchllm_operator.prefixes.requests import Requests
from batchllm_operator.prefixes.token_table import TokenTable

PART_TOKENS: Final = 1 << 23
"""Prompt tokens of a full part, whatever `part_rows` is: 32 MiB."""
SHARD_SCHEMA: Final = pa.schema(
    [
        pa.field("request_idx", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("num_prefix_tokens", pa.int32(), nullable=False),
        pa.field("num_output_tokens", pa.int64(), nullable=False),
        pa.field("row_idxs", pa.list_(pa.int64()), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
    ]
)
"""One row per request, in plan order. `request_idx` counts through all shards; `group_id` is
the group's position in the plan; `num_prefix_tokens` is what the request shares with its group;
`num_output_tokens` is an estimate."""

ADAPTER_FIELD: Final = pa.field("adapter", pa.string())
"""Name of the request's adapter, null for none; only in plans with adapters."""
TakeOut = Callable[[TokenTable], tuple[TokenTable, pa.Array]]
"""Prompts as they were planned -> the engine's prompts, and the adapter of each."""

_SHARD_ENCODING: Final = {"prompt_token_ids.list.element": "BYTE_STREAM_SPLIT"}
"""Smaller than plain, and faster to compress, as half of the ids' bytes are zero."""
_SHARD_BATCH: Final = 1 << 20
"""Values per encoding step. With Arrow's 1024, writing ids takes 1.5 times as long."""


def shard_file(shard_idx: int) -> str:
    return f"shard-{shard_idx:05d}.parquet"


def part_bounds(group_ids: Int64s, lengths: Int64s, part_rows: int) -> list[int]:
    """Boundaries of a shard's parts: `[0, ..., num_requests]`.

    A part ends with the first group that fills it, with `part_rows` requests or `PART_TOKENS`
    prompt tokens. A group that would at least double that is cut, so that parts stay bounded.

    Args:
        group_ids: int64 [num_requests], each group contiguous.
        lengths: int64 [num_requests], prompt tokens.
        part_rows: at least 1.
    """
    tokens_before = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=tokens_before[1:])

    def fullness(start: int, end: int) -> float:
        tokens = int(tokens_before[end] - tokens_before[start])
        return max((end - start) / part_rows, tokens / PART_TOKENS)

    bounds = [0]
    group_ends = np.flatnonzero(np.diff(group_ids)) + 1
    for group_end in [*group_ends.tolist(), len(group_ids)]:
        while fullness(bounds[-1], group_end) >= 2 and group_end - bounds[-1] > 1:
            full = np.searchsorted(tokens_before, tokens_before[bounds[-1]] + PART_TOKENS)
            bounds.append(max(bounds[-1] + 1, min(bounds[-1] + part_rows, int(full))))
        if group_end > bounds[-1] and fullness(bounds[-1], group_end) >= 1:
            bounds.append(group_end)
    if bounds[-1] != len(group_ids):
        bounds.append(len(group_ids))
    return bounds


def write_shard(
    path: Path,
    requests: Requests,
    groups: PrefixGroups,
    output_tokens: Int64s,
    *,
    first_request: int,
    first_group: int,
    part_rows: int,
    take_out: TakeOut | None = None,
) -> Generator[int]:
    """Write one shard, a row group for each part; yields the number of requests of each part.

    Args:
        requests: all requests of the plan.
        groups: the shard's, in plan order, over all requests.
        output_tokens: int64, estimates for all requests.
        first_request, first_group: the ids that the shard begins with.
        take_out: if there are adapters.
    """
    group_ids = np.repeat(first_group + np.arange(len(groups)), groups.sizes)
    prefixes = np.repeat(groups.num_prefix_tokens, groups.sizes).astype(np.int32)
    bounds = part_bounds(group_ids, requests.lengths[groups.member_idxs], part_rows)
    parts = [groups.member_idxs[start:end] for start, end in pairwise(bounds)]
    num_rows = requests.num_rows
    # Read the next part while one is compressed; more would only take memory.
    wanted = ((requests.prompt_idxs[part], 0, requests.lengths[part]) for part in parts)
    tables = read_ahead(requests.prompts, wanted, most=1)
    schema = SHARD_SCHEMA if take_out is None else SHARD_SCHEMA.append(ADAPTER_FIELD)
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}
    options |= {"column_encoding": _SHARD_ENCODING, "write_batch_size": _SHARD_BATCH}
    options["write_statistics"] = [name for name in schema.names if name != "prompt_token_ids"]
    with pq.ParquetWriter(path, schema, **options) as writer:
        for (start, end), part, prompts in zip(pairwise(bounds), parts, tables, strict=True):
            adapters: list[pa.Array] = []
            if take_out is not None:
                prompts, *adapters = take_out(prompts)
            columns = [
                pa.array(np.arange(start, end) + first_request),
                pa.array(group_ids[start:end]),
                pa.array(prefixes[start:end]),
                pa.array(output_tokens[part]),
                _list_array(requests.rows_of(part), num_rows[part]),
                _list_array(prompts.token_ids, prompts.lengths),
                *adapters,
            ]
            table = pa.table(columns, schema=schema)
            writer.write_table(table, row_group_size=max(end - start, 1))
            yield end - start


def _list_array(values: npt.NDArray[Any], lengths: Int64s) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
