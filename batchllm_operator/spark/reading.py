"""A snapshot's parts, dealt out to tasks, and what tasks need to read them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import pyarrow as pa
from pydantic import TypeAdapter

from batchllm_operator.lake import LakeTable, Snapshot, open_table
from batchllm_operator.lake.table import FilePart
from batchllm_operator.plan.adapters import RowAdapters
from batchllm_operator.prompts import Tokenizer, load_tokenizer
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.loading import parse_spec_json

PART_BYTES: Final = 64 << 20
"""Of a file; a larger row group is a part by itself."""
_MOST_TASKS: Final = 10_000
_OPENING_BYTES: Final = 256 << 10
"""What opening a file costs, in bytes that could be read meanwhile."""
PLACE_BITS: Final = 32
"""A row's place is its part's number, shifted by this, and its position among the part's rows."""


@dataclass(frozen=True, slots=True)
class NumberedPart:
    """A part, and its number in the order of the rows."""

    number: int
    part: FilePart


_PARTS: Final = TypeAdapter(list[NumberedPart])


@dataclass(frozen=True, slots=True)
class Reading:
    """What a task needs to read a part; small, as each task gets it."""

    spec_json: str
    ds: str
    snapshot: Snapshot
    """With one file at most: parts bring their own."""

    @classmethod
    def of(cls, spec: JobSpec, ds: str, snapshot: Snapshot) -> Reading:
        return cls(spec.model_dump_json(), ds, replace(snapshot, files=snapshot.files[:1]))

    @property
    def spec(self) -> JobSpec:
        return _spec(self.spec_json)

    def scan(self, part: FilePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The part's rows that pass the filter, in order."""
        spec = self.spec
        table = _table(spec.input.uri, spec.input.partition_column)
        return table.scan(self.snapshot, columns, spec.input.filter, part)

    def tokenizer(self, is_exact: bool = False) -> tuple[Tokenizer, RowAdapters | None]:
        """Loaded once in each process; if `is_exact`, it encodes without its fast library."""
        tokenizer, adapters = _tokenizer(self.spec_json, self.ds)
        if is_exact:
            tokenizer.be_exact()
        return tokenizer, adapters


def deal_out(table: LakeTable, snapshot: Snapshot) -> list[bytes]:
    """Payloads of tasks, each with neighbouring parts; a function of the snapshot alone."""
    return dealt([NumberedPart(*each) for each in enumerate(_parts(table, snapshot))])


def dealt(parts: Sequence[NumberedPart]) -> list[bytes]:
    """Payloads of tasks, each with some of the parts, in their order."""
    costs = [each.part.size_bytes + _OPENING_BYTES for each in parts]
    most = max(PART_BYTES, -(-sum(costs) // _MOST_TASKS))
    tasks: list[list[NumberedPart]] = []
    held = most
    for each, cost in zip(parts, costs, strict=True):
        if held + cost > most:
            tasks.append([])
            held = 0
        tasks[-1].append(each)
        held += cost
    return [_PARTS.dump_json(each) for each in tasks]


def parts_of(payload: bytes) -> list[NumberedPart]:
    """The parts of a task."""
    return _PARTS.validate_json(payload)


def _parts(table: LakeTable, snapshot: Snapshot) -> Iterator[FilePart]:
    """Parts of about `PART_BYTES`; small files aren't opened."""
    for file in snapshot.files:
        if file.size_bytes <= PART_BYTES:
            yield FilePart(file, size_bytes=file.size_bytes)
            continue
        footer = table.footer(snapshot, file)
        groups = [footer.row_group(idx) for idx in range(footer.num_row_groups)]
        sizes = [
            sum(g.column(i).total_compressed_size for i in range(g.num_columns)) for g in groups
        ]
        begin = first_row = 0
        for end in range(1, len(groups) + 1):
            size = sum(sizes[begin:end])
            if end == len(groups) or size + sizes[end] > PART_BYTES:
                yield FilePart(file, (begin, end), first_row, size)
                first_row += sum(group.num_rows for group in groups[begin:end])
                begin = end


@lru_cache(maxsize=4)
def _spec(spec_json: str) -> JobSpec:
    return parse_spec_json(spec_json, source="planner.engine: spark")


@lru_cache(maxsize=4)
def _table(uri: str, partition_column: str) -> LakeTable:
    return open_table(uri, partition_column)


@lru_cache(maxsize=1)
def _tokenizer(spec_json: str, ds: str) -> tuple[Tokenizer, RowAdapters | None]:
    # An executor has as many tasks as cores: more threads would only take turns.
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    spec = _spec(spec_json)
    tokenizer = load_tokenizer(spec, ds)
    return tokenizer, RowAdapters.of(spec, tokenizer)
