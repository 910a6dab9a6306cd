"""Spilled outputs: finished outputs whose parts are still open, so that a stop loses none.

A spill is a file of the outputs that an attempt has finished since its last one, of all open parts
together. Like a part it counts by an entry beside it, which isn't written once a later attempt has
begun, and is never replaced. Only a later attempt reads spills: it writes the parts whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.engine import EngineOutput
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.attempts import Attempt
from batchllm_operator.shards.parts import PART_SCHEMA, StoredOutputs, read_entries, write_outputs
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import Count, Counts

_PART_FIELD: Final = pa.field("part_idx", pa.int64(), nullable=False)
_PART_NAMES: Final = [n for n in PART_SCHEMA.names if n not in ("row_idxs", "generated_text")]


class SpillEntry(StoredOutputs):
    """The entry of a spill; `engine_s` counts until the spill."""

    what = "entry of a spill"
    version_field = "spill_version"
    prefix = "spill"

    spill_version: Literal[1] = 1
    shard_idx: Count
    spill_idx: Count
    parts: dict[Count, Count]
    """part_idx -> number of its requests in the file."""

    @property
    def number(self) -> int:
        return self.spill_idx


@dataclass(slots=True)
class OpenPart:
    """The finished outputs of a part that isn't written yet, by request_idx."""

    outputs: dict[int, EngineOutput] = field(default_factory=dict)
    row_idxs: dict[int, list[int]] = field(default_factory=dict)
    """The rows of these requests; while the part is in an engine, of all of its requests."""
    engine_s: float = 0.0
    """Its share of the spills' seconds."""

    def errors(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each request that has failed."""
        for request_idx, output in self.outputs.items():
            if output.error is not None:
                yield output.error, self.row_idxs[request_idx]

    @property
    def counts(self) -> Counts:
        """Of the outputs, without seconds."""
        return Counts.of((out, len(self.row_idxs[idx])) for idx, out in self.outputs.items())


def write_spill(
    attempt: Attempt,
    plan_id: str,
    shard_idx: int,
    spill_idx: int,
    outputs: Mapping[int, Sequence[EngineOutput]],
    row_idxs: Mapping[int, Sequence[int]],
    engine_s: float,
    schema: pa.Schema,
) -> SpillEntry:
    """Write a spill's file, then its entry; see `write_outputs`.

    `spill_idx` is a number that the attempt hasn't used; `outputs` are by part_idx, at least one.
    """
    fields = {
        "plan_id": plan_id,
        "shard_idx": shard_idx,
        "spill_idx": spill_idx,
        "parts": {part_idx: len(part) for part_idx, part in outputs.items()},
    }
    flat = [output for part in outputs.values() for output in part]
    part_idxs = [part_idx for part_idx, part in outputs.items() for _ in part]
    return write_outputs(
        *(SpillEntry, fields, attempt, flat, row_idxs, engine_s, schema.append(_PART_FIELD)),
        columns={_PART_FIELD.name: part_idxs},
    )


def read_spills(
    folder: Folder, plan_id: str, shard_idx: int, written: Container[int], schema: pa.Schema
) -> dict[int, OpenPart]:
    """The spilled outputs of a shard, of all attempts together, by part_idx; see `read_entries`.

    Of a request that was spilled twice, the output of the latest attempt counts. Those of parts
    that are `written` are left out. `schema` is the job's `part_schema`.
    """

    def is_wanted(entry: SpillEntry) -> bool:
        return any(part_idx not in written for part_idx in entry.parts)

    parts: dict[int, OpenPart] = {}
    for entry in read_entries(SpillEntry, folder, plan_id, is_wanted, shard_idx=shard_idx):
        for part_idx, num_requests in entry.parts.items():
            if part_idx not in written:
                part = parts.setdefault(part_idx, OpenPart())
                part.engine_s += entry.engine_s * num_requests / max(entry.num_requests, 1)
        for part_idx, row_idxs, output in _rows(folder, entry, schema):
            if part_idx in parts:
                parts[part_idx].outputs[output.request_idx] = output
                parts[part_idx].row_idxs[output.request_idx] = row_idxs
    return parts


def _rows(
    folder: Folder, entry: SpillEntry, schema: pa.Schema
) -> Iterator[tuple[int, list[int], EngineOutput]]:
    """The part, the rows and the output of each request in a spill."""
    table = pq.read_table(pa.BufferReader(folder.read_bytes(entry.path)))
    raw_names = [name for name in schema.names if name not in PART_SCHEMA.names]
    for row in table.to_pylist():
        raw = {name: row[name] for name in raw_names if row.get(name) is not None}
        fields = {name: row[name] for name in _PART_NAMES}
        if fields["error"] is not None:
            fields["error"] = RowError(**fields["error"])
        output = EngineOutput(text=row["generated_text"], raw=raw, **fields)
        yield row[_PART_FIELD.name], row["row_idxs"], output
