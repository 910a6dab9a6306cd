"""Failed rows: their number by kind, and a few examples of each."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class RowErrors:
    """Failed rows by kind, the part of their errors before the colon."""

    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By kind, row_idx and error of the first rows in input order."""

    @property
    def num_rows(self) -> int:
        return self.counts.total()

    def add(self, error: str, row_idxs: Iterable[int]) -> None:
        kind = error.partition(":")[0]
        row_idxs = list(row_idxs)
        self.counts[kind] += len(row_idxs)
        clipped = error if len(error) <= _MAX_CHARS else error[: _MAX_CHARS - 1] + "…"
        known = self._first.get(kind, [])
        new = [(row_idx, clipped) for row_idx in row_idxs]
        self._first[kind] = heapq.nsmallest(_NUM_EXAMPLES, [*known, *new])

    def kinds(self, plan: StoredPlan) -> tuple[ErrorKind, ...]:
        """The most frequent kinds, in descending order, with the keys of their first rows."""
        chosen = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))[:_NUM_KINDS]
        wanted = sorted({row_idx for kind in chosen for row_idx, _ in self._first[kind]})
        keys = _read_keys(plan, wanted)
        return tuple(
            ErrorKind(
                kind=kind,
                num_rows=self.counts[kind],
                example_keys=tuple(keys[row_idx] for row_idx, _ in self._first[kind]),
                example_error=self._first[kind][0][1],
            )
            for kind in chosen
        )


def find_errors(plan: StoredPlan, shards: Sequence[FinishedShard]) -> RowErrors:
    """Collect the errors of planning and of the shards' parts."""
    errors = RowErrors()
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
    if not any(entry.num_failed_rows for entry in shard.entries):
        return
    for part in shard.parts(["row_idxs", "error"]):
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
        here = [idx for idx in row_idxs if start <= idx < start + batch.num_rows]
        for row_idx in here:
            found[row_idx] = key_texts(batch, row_idx - start, names)
        start += batch.num_rows
        if len(found) == len(row_idxs):
            break
    return found
