"""A snapshot's parts, one for each task, and what tasks need to read them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import pyarrow as pa
from pydantic import TypeAdapter

from batchllm_operator.lake import LakeTable, Snapshot, StoredColumns, joined, open_table
from batchllm_operator.lake.table import FilePart
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.prompts import Tokenizer, load_tokenizer
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.loading import parse_spec_json
from batchllm_operator.streams import batches_of

PART_BYTES: Final = 64 << 20
"""Of a part; a larger row group is a part by itself."""
_MOST_PARTS: Final = 10_000
_OPENING_BYTES: Final = 256 << 10
"""What opening a file costs, in bytes that could be read meanwhile."""
PLACE_BITS: Final = 32
"""A row's place is its part's number, shifted by this, and its position among the part's rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring row groups and files, which one task reads."""

    number: int
    """In the order of the rows."""
    pieces: tuple[FilePart, ...]

    @property
    def first_place(self) -> int:
        return self.number << PLACE_BITS

    def to_bytes(self) -> bytes:
        return _PART.dump_json(self)

    @classmethod
    def of(cls, payload: bytes) -> Part:
        return _PART.validate_json(payload)


_PART: Final = TypeAdapter(Part)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a task needs to read a part; small, as each task gets it."""

    spec_json: str
    ds: str
    snapshot: Snapshot
    """With one file at most: parts bring their own."""
    stored: StoredColumns | None = None
    """The columns in the output table."""

    @classmethod
    def of(
        cls, spec: JobSpec, ds: str, snapshot: Snapshot, stored: StoredColumns | None = None
    ) -> Reading:
        some = replace(snapshot, files=snapshot.files[:1])
        return cls(spec.model_dump_json(), ds, some, stored)

    @property
    def spec(self) -> JobSpec:
        return _spec(self.spec_json)

    def scan(self, part: Part, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The part's rows that pass the filter, in order."""
        spec = self.spec
        table = _table(spec.input.uri, spec.input.partition_column)
        return joined(
            batch
            for piece in part.pieces
            for batch in table.scan(self.snapshot, columns, spec.input.filter, piece)
        )

    def tokenizer(self, is_exact: bool = False) -> tuple[Tokenizer, RowAdapters | None]:
        """Loaded once in each process; if `is_exact`, it encodes without its fast library."""
        tokenizer, adapters = _tokenizer(self.spec_json, self.ds)
        if is_exact:
            tokenizer.be_exact()
        return tokenizer, adapters


def parts_of(table: LakeTable, snapshot: Snapshot) -> list[Part]:
    """The parts of a snapshot, of which they are a function; small files aren't opened.

    There is always one, so that a plan has a file of rows.
    """
    pieces = list(_pieces(table, snapshot))
    most = max(PART_BYTES, -(-sum(map(_cost, pieces)) // _MOST_PARTS))
    parts = batches_of(pieces, (most, _cost)) if pieces else iter([[]])
    return [Part(number, tuple(part)) for number, part in enumerate(parts)]


def _cost(piece: FilePart) -> int:
    return piece.size_bytes + _OPENING_BYTES


def _pieces(table: LakeTable, snapshot: Snapshot) -> Iterator[FilePart]:
    """Pieces of about `PART_BYTES`; smaller files whole."""
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
    found = tokenizer, RowAdapters.of(spec, tokenizer)
    gc.freeze()  # of libraries nothing is garbage: to look at them took a tenth of a task's time
    return found
