"""Failed rows: their number by kind, the first ones, and whether they are too many."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import clipped, counted
from batchllm_operator.errors import FailedRowsError
from batchllm_operator.row_error import SKIPPED, RowError
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.counts import share
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, errors_of
from batchllm_operator.stored_plan.row_keys import key_texts
from batchllm_operator.stored_plan.run_report import ErrorKind, FailedRow

NUM_SHOWN: Final = 100
"""Rows that a report shows."""
_NUM_EXAMPLES: Final = 3
_NUM_KINDS: Final = 20
_NUM_NAMED_KINDS: Final = 5
_MAX_CHARS: Final = 300
_SPARE: Final = 1_000
"""Rows beyond those kept, so that keeping the first is seldom done."""


class PlanRows(Protocol):
    """The rows of a plan: a `StoredPlan`, or files that aren't published yet."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""

    @property
    def prompts(self) -> Sequence[str]:
        """Names of the job's prompts; none if it has one without a name."""

    def row_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """These columns of all rows, in input order."""


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows in files of a plan that isn't complete; see `PlanRows`."""

    folder: Folder
    files: Sequence[str]
    key: tuple[str, ...]
    prompts: Sequence[str]

    def row_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for name in self.files:
            with self.folder.open_file(name) as file:
                yield from pq.ParquetFile(file).iter_batches(columns=list(columns))


@dataclass(slots=True)
class RowErrors:
    """Failed rows by the kind of their errors; in a job of several prompts, failed asks."""

    num_examples: int = _NUM_EXAMPLES
    """Rows of each kind that are kept."""
    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, list[tuple[int, RowError]]] = field(default_factory=dict)
    """By kind, row_idx and error of the first rows in input order, and of some more."""

    @property
    def num_rows(self) -> int:
        return self.counts.total()

    def add(self, error: RowError, row_idxs: Sequence[int]) -> None:
        self.counts[error.kind] += len(row_idxs)
        shown = clip(error)
        first = self._first.setdefault(error.kind, [])
        first += [(row_idx, shown) for row_idx in row_idxs]
        if len(first) > 2 * self.num_examples + _SPARE:
            self._first[error.kind] = self._kept(error.kind)

    def add_all(self, failed: Iterable[tuple[RowError, Sequence[int]]]) -> None:
        for error, row_idxs in failed:
            self.add(error, row_idxs)

    def add_rejected(self, rows: PlanRows) -> None:
        """Add the rows that planning has rejected."""
        start = 0
        for batch in rows.row_batches([ERROR_COLUMN]):
            errors = errors_of(batch)
            if errors.null_count < len(errors):
                failed = np.flatnonzero(errors.is_valid().to_numpy(zero_copy_only=False)) + start
                for row_idx, fields in zip(failed.tolist(), errors.drop_null(), strict=True):
                    error = RowError(**fields.as_py())
                    if error.kind != SKIPPED:
                        self.add(error, [row_idx])
            start += len(errors)

    def _kept(self, kind: str) -> list[tuple[int, RowError]]:
        return heapq.nsmallest(self.num_examples, self._first[kind])

    def kinds(self, rows: PlanRows) -> tuple[ErrorKind, ...]:
        """The most frequent kinds, in descending order, with the keys of their first rows."""
        chosen = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))[:_NUM_KINDS]
        first = {kind: self._kept(kind)[:_NUM_EXAMPLES] for kind in chosen}
        asked = _Asked(rows, (row_idx for kept in first.values() for row_idx, _ in kept))
        return tuple(
            ErrorKind(
                kind=kind,
                num_rows=self.counts[kind],
                example_keys=tuple(asked.key(row_idx) for row_idx, _ in kept),
                example_error=asked.shown(*kept[0]),
            )
            for kind, kept in first.items()
        )

    def first_rows(self, rows: PlanRows) -> tuple[FailedRow, ...]:
        """The first `num_examples` rows of all kinds, in input order."""
        kept = (row for kind in self._first for row in self._kept(kind))
        return self._shown(rows, heapq.nsmallest(self.num_examples, kept))

    def rows_by_kind(self, rows: PlanRows) -> tuple[FailedRow, ...]:
        """`num_examples` rows, one of each kind in turn; by kind, the most frequent first."""
        kinds = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))
        dealt = sorted(
            (turn, place, row)
            for place, kind in enumerate(kinds)
            for turn, row in enumerate(self._kept(kind))
        )[: self.num_examples]
        return self._shown(rows, [row for _, _, row in sorted(dealt, key=itemgetter(1, 0))])

    def _shown(
        self, rows: PlanRows, chosen: Sequence[tuple[int, RowError]]
    ) -> tuple[FailedRow, ...]:
        asked = _Asked(rows, (idx for idx, _ in chosen))
        return tuple(
            FailedRow(asked.key(idx), error.kind, error.message or "", asked.prompt(idx))
            for idx, error in chosen
        )


def clip(error: RowError) -> RowError:
    """The error with at most 300 characters."""
    message = error.message
    return RowError(
        error.kind, message and clipped(message, _MAX_CHARS - len(error.kind) - len(": "))
    )


def are_too_many(spec: JobSpec, num_failed: int, num_rows: int) -> bool:
    """Whether so many failed rows of a plan are more than `max_failed_fraction` allows."""
    return num_failed > spec.max_failed_fraction * num_rows


def too_many_failed(
    spec: JobSpec,
    num_rows: int,
    rows: PlanRows,
    errors: RowErrors,
    *,
    verdict: str,
    cure: str,
    num_others: int = 0,
) -> FailedRowsError:
    """The error for more failed rows than `max_failed_fraction` allows.

    Args:
        verdict: what follows for the plan of `num_rows` rows.
        cure: what to do to go on with so many.
        num_others: failed rows that `errors` lacks.
    """
    num_failed, kinds = errors.num_rows + num_others, errors.kinds(rows)
    counts = [f"{kind.num_rows:,} {kind.kind}" for kind in kinds[:_NUM_NAMED_KINDS]]
    counts += [f"{num_others:,} in other shards"] if num_others else []
    counts += ["..."] if len(kinds) > _NUM_NAMED_KINDS else []
    example = ""
    if kinds:
        key = ", ".join(f"{name} {value}" for name, value in kinds[0].example_keys[0].items())
        example = f" First {kinds[0].kind}: {key}: {kinds[0].example_error!r}."
    message = (
        f"{num_failed:,} of {counted(num_rows, spec.unit)} failed, {share(num_failed, num_rows)}"
        f" ({', '.join(counts)}), more than max_failed_fraction {spec.max_failed_fraction} allows;"
        f" {verdict}.{example} {cure}. Or mend the rows, and plan again"
    )
    return FailedRowsError(message, num_failed, kinds)


class _Asked:
    """Keys and prompts of some rows, or of some asks."""

    def __init__(self, rows: PlanRows, idxs: Iterable[int]) -> None:
        self._prompts: Sequence[str | None] = rows.prompts or [None]
        self._keys = _read_keys(rows, {idx // len(self._prompts) for idx in idxs})

    def key(self, idx: int) -> dict[str, str]:
        return self._keys[idx // len(self._prompts)]

    def prompt(self, idx: int) -> str | None:
        return self._prompts[idx % len(self._prompts)]

    def shown(self, idx: int, error: RowError) -> str:
        prompt = self.prompt(idx)
        return str(error) if prompt is None else f"{prompt}: {error}"


def _read_keys(rows: PlanRows, row_idxs: set[int]) -> dict[int, dict[str, str]]:
    keys: dict[int, dict[str, str]] = {}
    left, start = sorted(row_idxs, reverse=True), 0
    for batch in rows.row_batches(rows.key) if left else ():
        while left and left[-1] < start + batch.num_rows:
            row_idx = left.pop()
            keys[row_idx] = key_texts(batch, row_idx - start, rows.key)
        start += batch.num_rows
        if not left:
            break
    return keys
