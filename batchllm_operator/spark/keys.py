"""Counts a snapshot's rows, and checks that their keys are unique, by digests that are shuffled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.plan.rows.keys import MAX_NAMED, null_keys, repeated_keys
from batchllm_operator.shards.reuse_index import fingerprint_array, fingerprints_of
from batchllm_operator.spark.reading import PLACE_BITS, Part, Reading
from batchllm_operator.spark.tasks import Batches, mapped, payloads_in, said, said_by, tasks
from batchllm_operator.stored_plan.row_keys import encode_keys, shown_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEMA: Final = pa.schema([("bucket", pa.int32()), ("digest", pa.binary()), ("place", pa.int64())])
_SPARK_SCHEMA: Final = "bucket int, digest binary, place long"
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
    digests = mapped(tasks(spark, payloads), digest, _SPARK_SCHEMA)
    shuffled = digests.repartitionById(num_buckets + 1, col("bucket"))
    found = said_by(shuffled.sortWithinPartitions("digest", "place"), repeats)
    firsts = np.zeros(len(parts) + 1, dtype=np.int64)
    nulls: dict[str, list[tuple[int, list[int], int]]] = {name: [] for name in spec.input.key}
    repeated: list[int] = []
    num_repeated = 0
    for each in map(json.loads, found):
        if "part" in each:
            firsts[each["part"] + 1] = each["num_rows"]
            for name, (num, places) in each["nulls"].items():
                nulls[name].append((each["part"], places, num))
        else:
            repeated += each["places"]
            num_repeated += each["num"]
    np.cumsum(firsts, out=firsts)
    numbers = RowNumbers(firsts)
    for name, found_nulls in nulls.items():
        if found_nulls:
            rows = [
                int(firsts[p]) + place for p, places, _ in sorted(found_nulls) for place in places
            ]
            raise null_keys(name, sum(n for _, _, n in found_nulls), rows[:MAX_NAMED], where)
    if num_repeated:
        places = sorted(repeated)[:MAX_NAMED]
        raise repeated_keys(
            list(_names(reading, parts, places)), num_repeated, spec.input.key, where
        )
    return numbers


def _most_rows(parts: Sequence[Part]) -> int:
    """Upper bound of the rows: no filter, and no row deleted."""
    pieces = (piece for part in parts for piece in part.pieces)
    return sum(piece.file.num_rows for piece in pieces if piece.first_row == 0)


def _digests(
    reading: Reading, part: Part, num_buckets: int, where: str
) -> Iterator[pa.RecordBatch]:
    """Digests of the part's keys; then, in a bucket of its own, the number of its rows."""
    key = reading.spec.input.key
    nulls: dict[str, tuple[int, list[int]]] = {}
    num_rows = 0
    for batch in reading.scan(part, key):
        for name in key:
            column = batch.column(name)
            if column.null_count:
                places = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) + num_rows
                num, first = nulls.get(name, (0, []))
                first = [*first, *places[: MAX_NAMED - len(first)].tolist()]
                nulls[name] = (num + len(places), first)
        digests = fingerprints_of(encode_keys(batch, where))
        heads = digests.view(np.uint8).reshape(len(digests), -1)[:, :4].copy().view("<u4")[:, 0]
        places = part.first_place + num_rows + np.arange(batch.num_rows)
        buckets = pa.array((heads % num_buckets).astype(np.int32))
        columns = [buckets, fingerprint_array(digests).cast(pa.binary()), pa.array(places)]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        num_rows += batch.num_rows
    counted = {"part": part.number, "num_rows": num_rows, "nulls": nulls}
    row = {"bucket": num_buckets, "digest": json.dumps(counted).encode(), "place": part.number}
    yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def _repeats(batches: Batches, num_buckets: int) -> Iterator[pa.RecordBatch]:
    """The first places of digests that occur again; counts of rows as they are."""
    last, first_place, is_repeated = None, 0, False
    places: list[int] = []
    num = 0
    for batch in batches:
        if batch.num_rows and batch.column("bucket")[0].as_py() == num_buckets:
            yield said(batch.column("digest").to_pylist())
            continue
        pairs = zip(
            batch.column("digest").to_pylist(), batch.column("place").to_pylist(), strict=True
        )
        for digest, place in pairs:
            if digest != last:
                last, first_place, is_repeated = digest, place, False
            elif not is_repeated:
                is_repeated = True
                num += 1
                places = sorted([*places, first_place])[:MAX_NAMED]
    if num:
        yield said([json.dumps({"num": num, "places": places}).encode()])


def _names(reading: Reading, parts: Sequence[Part], places: Sequence[int]) -> Iterator[str]:
    """The keys of some rows, in order."""
    for number in sorted({place >> PLACE_BITS for place in places}):
        start = parts[number].first_place
        for batch in reading.scan(parts[number], reading.spec.input.key):
            for place in places:
                if start <= place < start + batch.num_rows:
                    row = (column[place - start] for column in batch.columns)
                    yield " / ".join(map(shown_key, row))
            start += batch.num_rows
