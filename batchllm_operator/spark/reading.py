"""A snapshot's parts, one for each task: rows are read and counted, keys compared by digests."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.lake import (
    FilePart,
    LakeTable,
    Snapshot,
    StoredColumns,
    joined,
    open_table,
)
from batchllm_operator.plan.given import Given
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.keys import MAX_NAMED, NullKeys, named_keys, repeated_keys
from batchllm_operator.prompts import Tokenizer, load_tokenizers
from batchllm_operator.shards.reuse_index import fingerprint_array, fingerprints_of
from batchllm_operator.spark.tasks import (
    Batches,
    mapped,
    numbered,
    reported,
    reports_of,
    tasks,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.loading import parse_spec_json
from batchllm_operator.stored_plan.row_keys import encode_keys
from batchllm_operator.streams import batches_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PART_BYTES: Final = 64 << 20
"""Of a part; a larger row group is a part by itself."""
_MOST_PARTS: Final = 10_000
_OPENING_BYTES: Final = 256 << 10
"""What opening a file costs, in bytes that could be read meanwhile."""
PLACE_BITS: Final = 32
"""A row's place is its part's number, shifted by this, and its position among the part's rows; so
is an ask's place, with its number among the part's asks."""

_KEY_SCHEMA: Final = pa.schema(
    [("bucket", pa.int32()), ("digest", pa.binary()), ("place", pa.int64())]
)
_BUCKET_ROWS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring row groups and files, which one task reads."""

    number: int
    """In the order of the rows."""
    pieces: tuple[FilePart, ...]

    @property
    def first_place(self) -> int:
        return self.number << PLACE_BITS


@dataclass(frozen=True, slots=True)
class Reading:
    """What a task needs to read a part; small, as each task gets it."""

    spec: JobSpec
    ds: str
    snapshot: Snapshot
    """Without its files: parts bring their own."""
    where: str
    """Names the rows in errors."""
    stored: StoredColumns | None = None
    """The columns in the output table."""
    is_exact: bool = False
    """Whether prompts are encoded without the fast library, whose ids have differed before."""

    @classmethod
    def of(cls, given: Given, *, is_exact: bool = False) -> Reading:
        snapshot = replace(given.snapshot, files=())
        return cls(given.spec, given.ds, snapshot, given.where, given.stored, is_exact)

    def scan(self, part: Part, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The part's rows that pass the filter, in order."""
        spec = self.spec
        table = _table(spec.input.uri, next(iter(spec.input.places(self.ds))))
        return joined(
            batch
            for piece in part.pieces
            for batch in table.scan(self.snapshot, columns, spec.input.filter, piece)
        )

    def tokenizers(self) -> tuple[Sequence[Tokenizer], RowAdapters | None]:
        """One for each question; loaded once in each process."""
        tokenizers, adapters = _tokenizers(self.spec.model_dump_json(), self.ds)
        if self.is_exact:
            for tokenizer in tokenizers:
                tokenizer.be_exact()
        return tokenizers, adapters


def parts_of(table: LakeTable, snapshot: Snapshot) -> list[Part]:
    """The parts of a snapshot, at least one: a function of it; small files aren't opened."""
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
        for some in batches_of(enumerate(sizes), (PART_BYTES, itemgetter(1))):
            begin, end = some[0][0], some[-1][0] + 1
            yield FilePart(file, (begin, end), sum(sizes[begin:end]))


@lru_cache(maxsize=4)
def _table(uri: str, partition_column: str) -> LakeTable:
    return open_table(uri, partition_column)


@lru_cache(maxsize=1)
def _tokenizers(spec_json: str, ds: str) -> tuple[Sequence[Tokenizer], RowAdapters | None]:
    # An executor has as many tasks as cores: more threads would only take turns.
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    spec = parse_spec_json(spec_json, source="planner.engine: spark")
    tokenizers = load_tokenizers(spec, ds)
    loaded = tokenizers, RowAdapters.of(spec, tokenizers[0])
    gc.freeze()  # of libraries nothing is garbage: to look at them took a tenth of a task's time
    return loaded


@dataclass(frozen=True, slots=True, eq=False)
class RowNumbers:
    """Turns places into numbers of asks, of all rows that take part."""

    firsts: npt.NDArray[np.int64]
    """[num_parts + 1]: the position of each part's first row; then the number of all rows."""
    num_questions: int

    @property
    def num_rows(self) -> int:
        return int(self.firsts[-1])

    @property
    def num_asks(self) -> int:
        return self.num_rows * self.num_questions

    def of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        firsts: npt.NDArray[np.int64] = self.firsts[places >> PLACE_BITS] * self.num_questions
        return firsts + (places & ((1 << PLACE_BITS) - 1))


def number_rows(spark: SparkSession, reading: Reading, parts: Sequence[Part]) -> RowNumbers:
    """Count the rows of each part, and check their keys (`KeyColumnError`)."""
    from pyspark.sql.functions import col

    key, where = reading.spec.input.key, reading.where
    pieces = (piece for part in parts for piece in part.pieces)
    # An upper bound: no filter, and no row deleted.
    most_rows = sum(p.file.num_rows for p in pieces if not p.row_groups or not p.row_groups[0])
    num_buckets = max(1, most_rows // _BUCKET_ROWS)

    digest = partial(_digests, reading, num_buckets)
    digests = tasks(spark, parts, Part, digest, _KEY_SCHEMA)
    shuffled = digests.repartitionById(num_buckets + 1, col("bucket"))
    ordered = shuffled.sortWithinPartitions("digest", "place")
    results = reports_of(mapped(ordered, partial(_repeats, num_buckets)), dict[str, Any])
    counted = sorted((report for report in results if "part" in report), key=itemgetter("part"))
    firsts = np.cumsum([0, *(part["num_rows"] for part in counted)], dtype=np.int64)
    nulls = NullKeys(key)
    for first, part in zip(firsts.tolist(), counted, strict=False):
        for name, num in part["nulls"].items():
            nulls.note(name, num, [first + row for row in part["first"][name]])
    nulls.check(where)
    repeats = [report for report in results if "part" not in report]
    if num_repeated := sum(report["num"] for report in repeats):
        places = sorted(place for report in repeats for place in report["places"])[:MAX_NAMED]
        names: list[str] = []
        for number in sorted({place >> PLACE_BITS for place in places}):
            scanned = reading.scan(parts[number], key)
            names += named_keys(scanned, parts[number].first_place, places)
        raise repeated_keys(names, num_repeated, key, where)
    return RowNumbers(firsts, len(reading.spec.questions))


def _digests(reading: Reading, num_buckets: int, part: Part) -> Iterator[pa.RecordBatch]:
    """Digests of the part's keys; then, in a bucket of its own, the number of its rows."""
    key = reading.spec.input.key
    nulls, num_rows = NullKeys(key), 0
    for batch in reading.scan(part, key):
        nulls.add(batch, num_rows)
        digests = fingerprints_of(encode_keys(batch, reading.where))
        heads = digests.view(np.uint8).reshape(len(digests), -1)[:, :4].copy().view("<u4")[:, 0]
        places = part.first_place + num_rows + np.arange(batch.num_rows)
        buckets = pa.array((heads % num_buckets).astype(np.int32))
        columns = [buckets, fingerprint_array(digests).cast(pa.binary()), pa.array(places)]
        yield pa.RecordBatch.from_arrays(columns, schema=_KEY_SCHEMA)
        num_rows += batch.num_rows
    counted: dict[str, Any] = {"part": part.number, "num_rows": num_rows}
    counted |= {"nulls": nulls.counts, "first": nulls.first}
    row = {"bucket": num_buckets, "digest": json.dumps(counted).encode(), "place": part.number}
    yield pa.RecordBatch.from_pylist([row], schema=_KEY_SCHEMA)


def _repeats(num_buckets: int, batches: Batches) -> Iterator[pa.RecordBatch]:
    """The first places of digests that occur again; counts of rows as they are."""
    bucket, batches = numbered(batches)
    if bucket == num_buckets:
        for batch in batches:
            yield reported(*map(json.loads, batch.column("digest").to_pylist()))
        return
    places: list[int] = []
    num = 0
    columns = (batch.select(["digest", "place"]).to_pydict() for batch in batches)
    rows = (row for batch in columns for row in zip(batch["digest"], batch["place"], strict=True))
    for _, equal in groupby(rows, itemgetter(0)):
        two = list(islice(equal, 2))
        if len(two) > 1:
            num += 1
            places = sorted([*places, two[0][1]])[:MAX_NAMED]
    if num:
        yield reported({"num": num, "places": places})
