"""Failed rows: their number by kind, and the first ones."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow.compute as pc

from batchllm_operator.artifacts.manifest import ERROR_COLUMN
from batchllm_operator.artifacts.row_keys import key_texts
from batchllm_operator.artifacts.run_report import ErrorKind
from batchllm_operator.artifacts.stored_plan import StoredPlan
from batchllm_operator.commit.partition import FinishedShard

_NUM_EXAMPLES: Final = 3
_NUM_KINDS: Final = 20
_MAX_CHARS: Final = 300
_SPARE: Final = 1_000
"""Rows beyond those kept, so that keeping the first is seldom done."""


@dataclass(slots=True)
class RowErrors:
    """Failed rows by kind, the part of their errors before the colon."""

    num_examples: int = _NUM_EXAMPLES
    """Rows of each kind that are kept."""
    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By kind, row_idx and error of the first rows in input order, and of some more."""

    @property
    def num_rows(self) -> int:
        return self.counts.total()

    def add(self, error: str, row_idxs: Iterable[int]) -> None:
        kind = error.partition(":")[0]
        row_idxs = list(row_idxs)
        self.counts[kind] += len(row_idxs)
        clipped = clip(error)
        first = self._first.setdefault(kind, [])
        first += [(row_idx, clipped) for row_idx in row_idxs]
        if len(first) > 2 * self.num_examples + _SPARE:
            self._first[kind] = self._kept(kind)

    def _kept(self, kind: str) -> list[tuple[int, str]]:
        return heapq.nsmallest(self.num_examples, self._first[kind])

    def kinds(self, plan: StoredPlan) -> tuple[ErrorKind, ...]:
        """The most frequent kinds, in descending order, with the keys of their first rows."""
        chosen = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))[:_NUM_KINDS]
        first = {kind: self._kept(kind) for kind in chosen}
        wanted = sorted({row_idx for rows in first.values() for row_idx, _ in rows})
        keys = _read_keys(plan, wanted)
        return tuple(
            ErrorKind(
                kind=kind,
                num_rows=self.counts[kind],
                example_keys=tuple(keys[row_idx] for row_idx, _ in first[kind]),
                example_error=first[kind][0][1],
            )
            for kind in chosen
        )

    def first_rows(self, plan: StoredPlan) -> list[tuple[dict[str, str], str]]:
        """Key and error of the first `num_examples` rows of all kinds, in input order."""
        found = (row for kind in self._first for row in self._kept(kind))
        first = heapq.nsmallest(self.num_examples, found)
        keys = _read_keys(plan, [row_idx for row_idx, _ in first])
        return [(keys[row_idx], error) for row_idx, error in first]


def clip(error: str) -> str:
    return error if len(error) <= _MAX_CHARS else error[: _MAX_CHARS - 1] + "…"


def find_errors(
    plan: StoredPlan, shards: Sequence[FinishedShard], num_examples: int = _NUM_EXAMPLES
) -> RowErrors:
    """Collect the errors of planning and of the shards' parts."""
    errors = RowErrors(num_examples)
    start = 0
    for batch in plan.row_batches([ERROR_COLUMN]):
        column = batch.column(0)
        if column.null_count < len(column):
            failed = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
            for offset, error in zip(failed, column.drop_null().to_pylist(), strict=True):
                errors.add(error, [start + int(offset)])
        start += batch.num_rows
    for shard in shards:
        for error, row_idxs in _failed_requests(shard):
            errors.add(error, row_idxs)
    return errors


def _failed_requests(shard: FinishedShard) -> Iterator[tuple[str, list[int]]]:
    entries = [entry for entry in shard.entries if entry.num_failed_rows]
    for part in replace(shard, entries=entries).parts(["row_idxs", "error"]):
        failed = part.filter(pc.is_valid(part["error"]))
        yield from zip(failed["error"].to_pylist(), failed["row_idxs"].to_pylist(), strict=True)


def _read_keys(plan: StoredPlan, row_idxs: Sequence[int]) -> dict[int, dict[str, str]]:
    """Keys of a few rows, as text. `row_idxs` are ascending."""
    if not row_idxs:
        return {}
    names = plan.manifest.spec.input.key
    found: dict[int, dict[str, str]] = {}
    start = 0
    for batch in plan.row_batches(names):
        end = start + batch.num_rows
        for row_idx in row_idxs[bisect_left(row_idxs, start) : bisect_left(row_idxs, end)]:
            found[row_idx] = key_texts(batch, row_idx - start, names)
        start = end
        if len(found) == len(row_idxs):
            break
    return found
