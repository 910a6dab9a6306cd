"""Counts a snapshot's rows, and checks that their keys are unique, by digests that are shuffled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.plan.rows.keys import MAX_NAMED, NullKeys, named_keys, repeated_keys
from batchllm_operator.shards.reuse_index import fingerprint_array, fingerprints_of
from batchllm_operator.spark.reading import PLACE_BITS, Part, Reading
from batchllm_operator.spark.tasks import Batches, mapped, payloads_in, said, said_by, tasks
from batchllm_operator.stored_plan.row_keys import encode_keys

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEMA: Final = pa.schema([("bucket", pa.int32()), ("digest", pa.binary()), ("place", pa.int64())])
_BUCKET_ROWS: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RowNumbers:
    """Turns places into positions among all rows that take part.

    Attributes:
        firsts: int64 [num_parts + 1], the position of each part's first row; then the number of
            all rows.
    """

    firsts: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return int(self.firsts[-1])

    def of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.firsts[places >> PLACE_BITS]
        return found + (places & ((1 << PLACE_BITS) - 1))


def number_rows(
    spark: SparkSession, reading: Reading, parts: Sequence[Part], where: str
) -> RowNumbers:
    """Count the rows of each part, and check their keys.

    Args:
        where: names the table in errors.

    Raises:
        KeyColumnError: keys aren't unique or are null; names up to ten.
    """
    from pyspark.sql.functions import col

    spec = reading.spec
    num_buckets = max(1, _most_rows(parts) // _BUCKET_ROWS)

    def digest(batches: Batches) -> Iterator[Any]:
        for payload in payloads_in(batches):
            yield from _digests(reading, Part.of(payload), num_buckets, where)

    def repeats(batches: Batches) -> Iterator[Any]:
        yield from _repeats(batches, num_buckets)

    payloads = [part.to_bytes() for part in parts]
    digests = mapped(tasks(spark, payloads), digest, _SCHEMA)
    shuffled = digests.repartitionById(num_buckets + 1, col("bucket"))
    found = said_by(shuffled.sortWithinPartitions("digest", "place"), repeats)
    results = list(map(json.loads, found))
    counted = sorted((each for each in results if "part" in each), key=itemgetter("part"))
    firsts = np.cumsum([0, *(part["num_rows"] for part in counted)], dtype=np.int64)
    nulls = NullKeys(spec.input.key)
    for first, part in zip(firsts.tolist(), counted, strict=False):
        for name, num in part["nulls"].items():
            nulls.note(name, num, [first + row for row in part["first"][name]])
    nulls.check(where)
    repeats_found = [each for each in results if "part" not in each]
    if num_repeated := sum(each["num"] for each in repeats_found):
        places = sorted(place for each in repeats_found for place in each["places"])[:MAX_NAMED]
        names = list(_names(reading, parts, places))
        raise repeated_keys(names, num_repeated, spec.input.key, where)
    return RowNumbers(firsts)


def _most_rows(parts: Sequence[Part]) -> int:
    """Upper bound of the rows: no filter, and no row deleted."""
    pieces = (piece for part in parts for piece in part.pieces)
    return sum(piece.file.num_rows for piece in pieces if piece.first_row == 0)


def _digests(
    reading: Reading, part: Part, num_buckets: int, where: str
) -> Iterator[pa.RecordBatch]:
    """Digests of the part's keys; then, in a bucket of its own, the number of its rows."""
    key = reading.spec.input.key
    nulls, num_rows = NullKeys(key), 0
    for batch in reading.scan(part, key):
        nulls.add(batch, num_rows)
        digests = fingerprints_of(encode_keys(batch, where))
        heads = digests.view(np.uint8).reshape(len(digests), -1)[:, :4].copy().view("<u4")[:, 0]
        places = part.first_place + num_rows + np.arange(batch.num_rows)
        buckets = pa.array((heads % num_buckets).astype(np.int32))
        columns = [buckets, fingerprint_array(digests).cast(pa.binary()), pa.array(places)]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        num_rows += batch.num_rows
    counted: dict[str, Any] = {"part": part.number, "num_rows": num_rows}
    counted |= {"nulls": nulls.counts, "first": nulls.first}
    row = {"bucket": num_buckets, "digest": json.dumps(counted).encode(), "place": part.number}
    yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def _repeats(batches: Batches, num_buckets: int) -> Iterator[pa.RecordBatch]:
    """The first places of digests that occur again; counts of rows as they are."""
    batches = (batch for batch in batches if batch.num_rows)
    first = next(batches, None)
    if first is None:
        return
    batches = chain([first], batches)
    if first.column("bucket")[0].as_py() == num_buckets:
        yield from (said(batch.column("digest").to_pylist()) for batch in batches)
        return
    places: list[int] = []
    num = 0
    columns = (batch.select(["digest", "place"]).to_pydict() for batch in batches)
    rows = (row for each in columns for row in zip(each["digest"], each["place"], strict=True))
    for _, equal in groupby(rows, itemgetter(0)):
        two = list(islice(equal, 2))
        if len(two) > 1:
            num += 1
            places = sorted([*places, two[0][1]])[:MAX_NAMED]
    if num:
        yield said([json.dumps({"num": num, "places": places}).encode()])


def _names(reading: Reading, parts: Sequence[Part], places: Sequence[int]) -> Iterator[str]:
    """The keys of some rows, in order."""
    for number in sorted({place >> PLACE_BITS for place in places}):
        part = parts[number]
        yield from named_keys(reading.scan(part, reading.spec.input.key), part.first_place, places)
