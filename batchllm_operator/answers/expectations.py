"""What a spec expects of the answers as a whole, measured as they stream by in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pydantic import BaseModel, ConfigDict, Field

from batchllm_operator.errors import SpecError
from batchllm_operator.lake import find_place
from batchllm_operator.lake.places import Place
from batchllm_operator.prompts.values import is_string
from batchllm_operator.row_error import ANSWERED, ASKED, SKIPPED
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.expect import Expectation

_STATUS: Final = "status"
_MOST_VALUES: Final = 10_000
"""Values of a column that are counted one by one."""
_MOST_NUMBERS: Final = 1 << 18
_MOST_DIGESTS: Final = 1 << 22
_KINDS: Final = {
    "empty": "text",
    "duplicate": "text",
    "matches": "text",
    "values": "text, whole numbers and booleans",
    "drift": "text, whole numbers and booleans",
    "range": "numbers",
    "quantiles": "text and whole numbers",
}
"""Columns for which a field of `Expectation` is."""


class Measured(BaseModel):
    """A number that a spec bounds, as the answers have it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    column: str
    what: str
    """Path of the bounds in `Expectation`, such as `values.spam`."""
    value: float | None
    """None without answers; of drift, without an earlier partition."""
    min: float | None = None
    max: float | None = None
    earlier: dict[str, float] = Field(default_factory=dict)
    """By partition, what the job's reports of those before have."""

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return True
        is_low = self.min is not None and self.value < self.min
        return not is_low and not (self.max is not None and self.value > self.max)

    @property
    def bounds(self) -> str:
        named = {"at least": self.min, "at most": self.max}
        return " and ".join(
            f"{n} {_digits(bound)}" for n, bound in named.items() if bound is not None
        )

    def __str__(self) -> str:
        shown = "unknown" if self.value is None else _digits(self.value)
        return f"{self.column}: {self.what} is {shown}, expected {self.bounds}"


def _digits(number: float) -> str:
    """Six digits of a share, all of a larger number: it may be a price or a count."""
    return f"{number:.6g}" if abs(number) <= 1 else f"{number:.15g}"


class Watched(NamedTuple):
    """A column of which a spec expects something."""

    name: str
    place: Place
    status: Place
    expected: Expectation

    def chosen(self, batch: pa.RecordBatch) -> pa.Array:
        """The values of rows that are answered; statuses of those that were asked."""
        return self.place.of(batch).filter(self._are_chosen(batch))

    def at_fault(self, batch: pa.RecordBatch, unmet: Measured) -> pa.BooleanArray:
        """The rows that break a bound of the column, one that `Expectation.rowless` hasn't."""
        values = self.place.of(batch)
        if unmet.what == "range.min":
            found = pc.less(values, unmet.min)
        elif unmet.what == "range.max":
            found = pc.greater(values, unmet.max)
        else:
            found = are(unmet.what, values)
            found = pc.invert(found) if unmet.max is None else found
        return pc.and_(pc.fill_null(found, False), self._are_chosen(batch))

    def _are_chosen(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        statuses = self.status.of(batch)
        if self.place == self.status:
            return pc.not_equal(statuses, SKIPPED)
        return pc.is_in(statuses, pa.array(ANSWERED))


def watched_columns(spec: JobSpec, schema: pa.Schema) -> list[Watched]:
    """The columns of the output of which a spec expects something; raises as `watched_column`."""
    return [watched_column(spec, name, schema) for name in spec.expect]


def watched_column(spec: JobSpec, name: str, schema: pa.Schema) -> Watched:
    """A column of an output table of the job, which has this schema.

    Raises `SpecError`: the job writes no such column, its type isn't for what is expected, or it
    never holds a value whose share is.
    """
    expected, place = spec.expect[name], find_place(schema, name)
    if place is None or place.column not in (tuple(spec.prompts) or spec.answer_columns):
        known = [f"{prompt}.COLUMN" for prompt in spec.prompts] or spec.answer_columns
        raise SpecError(
            f"expect: {name!r} is no column of the answers; they have {', '.join(known)}"
        )
    owner = f"{place.column}." if spec.prompts else ""
    if f"{name}.".startswith(f"{owner}error."):
        raise SpecError(f"expect.{name}: rows with an error have no answer; bound {owner}{_STATUS}")
    if (status := find_place(schema, f"{owner}{_STATUS}")) is None:
        raise SpecError(f"expect.{name}: the table has no column {owner}{_STATUS}")
    _check_kind(name, expected, place.kind)
    possible: Collection[str] = ()
    if place == status:
        possible = ASKED
    elif name == f"{owner}label":
        possible = (spec.prompts[place.column] if spec.prompts else spec).labels
    for value in expected.values:
        if possible and value not in possible:
            raise SpecError(f"expect.{name}.values: {value!r} is none of {', '.join(possible)}")
    return Watched(name, place, status, expected)


def _check_kind(name: str, expected: Expectation, kind: pa.DataType) -> None:
    is_text, is_whole = is_string(kind), types.is_integer(kind)
    fits = {
        "text": is_text,
        "numbers": is_whole or types.is_floating(kind),
        "text and whole numbers": is_text or is_whole,
        "text, whole numbers and booleans": is_text or is_whole or types.is_boolean(kind),
    }
    for field, kinds in _KINDS.items():
        if getattr(expected, field) and not fits[kinds]:
            raise SpecError(f"expect.{name}.{field}: is for {kinds}; the column holds {kind}")
    for pattern in expected.matches:
        try:
            pc.match_substring_regex(pa.array([""]), pattern)
        except pa.ArrowInvalid as error:
            raise SpecError(f"expect.{name}.matches: {pattern!r}: {error}") from error


def tally(watched: Sequence[Watched], batches: Iterable[pa.RecordBatch]) -> dict[str, Tally]:
    """What a table's rows have in these columns, by their names."""
    tallies = {column.name: Tally(column.expected) for column in watched}
    for batch in batches:
        for column in watched:
            tallies[column.name].add(column.chosen(batch))
    return tallies


class Tally:
    """What values of a column have, as far as it is expected."""

    def __init__(self, expected: Expectation) -> None:
        self._expected = expected
        self._num_rows = self._num_missing = 0
        self._hits = Counter[str]()
        """Texts by what is true of them."""
        self._values = Counter[str | None]()
        """None stands for all values beyond `_MOST_VALUES`."""
        self._distinct, self._numbers = Distinct(), Numbers()
        self._range: tuple[float, float] | None = None

    def add(self, values: pa.Array) -> None:
        """Add values of the next rows."""
        expected = self._expected
        self._num_rows += len(values)
        self._num_missing += values.null_count
        if not len(values := values.drop_null()):
            return
        for what in expected.bounds:
            if what.startswith(("empty", "matches.")):
                self._hits[what] += int(pc.sum(are(what, values)).as_py() or 0)
        if expected.duplicate is not None:
            self._distinct.add(values)
        if expected.values or expected.drift is not None:
            self._count(values.cast(pa.large_string()))
        if expected.quantiles:
            self._numbers.add(pc.utf8_length(values) if is_string(values.type) else values)
        if expected.range is not None:
            low, high = pc.min_max(values).as_py().values()
            first, last = self._range or (low, high)
            self._range = min(low, first), max(high, last)

    def _count(self, values: pa.Array) -> None:
        for value, number in _pairs(values):
            is_known = value in self._values or value in self._expected.values
            is_counted = is_known or len(self._values) < _MOST_VALUES
            self._values[value if is_counted else None] += number

    def measured(self, name: str, before: Tally | None) -> Iterator[Measured]:
        """What the spec bounds of the column `name`; `before` is of an earlier partition."""
        for what, bounds in self._expected.bounds.items():
            value = None if self._num_rows == 0 else self._value(what, before)
            yield Measured(column=name, what=what, value=value, **bounds.model_dump())

    def _value(self, what: str, before: Tally | None) -> float | None:
        kind, _, name = what.partition(".")
        if kind == "missing":
            return self._num_missing / self._num_rows
        if not (num := self._num_rows - self._num_missing):
            return None
        if kind == "drift":
            return None if before is None else self._drift(before)
        if kind == "duplicate":
            return max(0.0, 1 - self._distinct.number / num)
        if kind == "values":
            return self._values[name] / num
        if kind == "quantiles":
            return self._numbers.quantile(name)
        if kind == "range" and self._range is not None:
            return float(np.nan_to_num(self._range[name == "max"]))  # JSON has no infinity
        return self._hits[what] / num

    def _drift(self, before: Tally) -> float | None:
        """Total variation between the shares of values."""
        ours, theirs = self._values, before._values
        if not theirs:
            return None
        num_ours, num_theirs, names = ours.total(), theirs.total(), ours.keys() | theirs.keys()
        return sum(abs(ours[n] / num_ours - theirs[n] / num_theirs) for n in names) / 2


class Distinct:
    """The number of different texts, by digests of 64 bits: exact up to `_MOST_DIGESTS`.

    Beyond, those whose digest is a multiple of 2, then of 4, 8 ... are counted (adaptive sampling,
    Flajolet 1990): with this many the error is about 0.05 %.
    """

    def __init__(self) -> None:
        self._kept: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._new: list[npt.NDArray[np.uint64]] = []
        self._step = 1

    def add(self, texts: pa.Array) -> None:
        encoded = texts.cast(pa.large_binary()).to_pylist()
        made = b"".join(blake2b(text, digest_size=8).digest() for text in encoded)
        digests = np.unique(np.frombuffer(made, dtype=np.uint64))
        self._new.append(digests[digests % self._step == 0])
        if sum(map(len, self._new)) > _MOST_DIGESTS:
            self._merge()

    def _merge(self) -> None:
        self._kept = np.unique(np.concatenate([self._kept, *self._new]))
        self._new.clear()
        while len(self._kept) > _MOST_DIGESTS:
            self._step *= 2
            self._kept = self._kept[self._kept % self._step == 0]

    @property
    def number(self) -> int:
        self._merge()
        return len(self._kept) * self._step


class Numbers:
    """Counts of whole numbers: exact up to `_MOST_NUMBERS` different ones; beyond, of 2, 4 ...
    neighbours together."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._step = 1

    def add(self, numbers: pa.Array) -> None:
        self._put(_pairs(numbers))
        while len(self._counts) > _MOST_NUMBERS:
            self._step *= 2
            before, self._counts = self._counts, Counter()
            self._put(before.items())

    def _put(self, counts: Iterable[tuple[int, int]]) -> None:
        for number, count in counts:
            self._counts[number // self._step * self._step] += count

    def quantile(self, name: str) -> int:
        """The least number that is not below such a share of the numbers, as `p50`."""
        wanted = max(1, ceil(Fraction(name[1:]) / 100 * self._counts.total()))
        numbers = sorted(self._counts)
        up_to = accumulate(self._counts[number] for number in numbers)
        return next(n for n, num in zip(numbers, up_to, strict=True) if num >= wanted)


def are(what: str, values: pa.Array) -> pa.BooleanArray:
    """Which values are what the share of this path counts; null for null, where it isn't that."""
    kind, _, name = what.partition(".")
    if kind == "missing":
        return values.is_null()
    if kind == "empty":
        return pc.equal(pc.utf8_trim_whitespace(values), "")
    if kind == "matches":
        return pc.match_substring_regex(values, name)
    return pc.equal(values.cast(pa.large_string()), name)


def _pairs(values: pa.Array) -> Iterator[tuple[Any, int]]:
    """Different values, each with its number."""
    counts = pc.value_counts(values)
    return zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
