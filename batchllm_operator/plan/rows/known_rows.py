"""Identifies published rows with a plan's rows, by a digest of the key.

Positions don't: rows may have been deleted, added or sorted since they were published.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.errors import PlanError
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.shards.reuse_index import FINGERPRINT_DTYPE, find_places, fingerprints_of
from batchllm_operator.stored_plan.row_keys import encode_keys
from batchllm_operator.stored_plan.stored_plan import StoredPlan

_NONE: Final = -1


class KnownRows:
    """The rows of a plan by the digests of their keys; each is found once.

    Takes 25 bytes of memory per row, and twice as much while reading.
    """

    def __init__(self, plan: StoredPlan, columns: pa.Schema) -> None:
        """Read the keys.

        Args:
            plan: its keys are unique.
            columns: schema of the table that it was published to. Formats change types, so keys
                are compared in the table's types.

        Raises:
            PlanError: the rows aren't the plan's, or the table lacks a key column.
            pa.ArrowException: keys can't be of the table's types.
            OSError: the plan's rows are missing or can't be read.
        """
        key = plan.manifest.spec.input.key
        if missing := set(key).difference(columns.names):
            raise PlanError(f"the table has no column {min(missing)!r} any more")
        self.columns = key
        self._where = f"plan {plan.folder.uri}: its rows"
        digests = np.empty(plan.manifest.counts.num_rows, dtype=FINGERPRINT_DTYPE)
        start = 0
        # Checksums aren't verified: most of a file may be carried columns, which aren't read.
        wanted = pa.schema([columns.field(name) for name in key])
        for rows in plan.manifest.row_files:
            with plan.folder.open_file(rows.file, read_ahead=False) as file:
                for batch in read_batches(file, wanted, {}):
                    if start + batch.num_rows <= len(digests):
                        digests[start : start + batch.num_rows] = self._digests(batch)
                    start += batch.num_rows
        if start != len(digests):
            raise PlanError(f"{self._where} are {start}, not {len(digests)}")
        self._row_idxs = np.argsort(digests)
        self._digests_sorted = digests[self._row_idxs]
        self._is_found = np.zeros(len(digests), dtype=np.bool_)

    def take(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """The row_idx of each row: int64 [num_rows].

        -1 for a row that the plan lacks, and for one that was found before: another program has
        added it.
        """
        keys = batch.select(self.columns)
        is_whole = np.ones(batch.num_rows, dtype=np.bool_)  # nulls are encoded like empty texts
        for column in keys.columns:
            is_whole &= column.is_valid().to_numpy(zero_copy_only=False)
        places = find_places(self._digests_sorted, self._digests(keys))
        places[~is_whole] = _NONE
        _, firsts = np.unique(places, return_index=True)
        is_first = np.zeros(batch.num_rows, dtype=np.bool_)
        is_first[firsts] = True
        chosen = np.flatnonzero(is_first & (places != _NONE))
        chosen = chosen[~self._is_found[places[chosen]]]
        self._is_found[places[chosen]] = True
        row_idxs = np.full(batch.num_rows, _NONE, dtype=np.int64)
        row_idxs[chosen] = self._row_idxs[places[chosen]]
        return row_idxs

    def _digests(self, keys: pa.RecordBatch) -> npt.NDArray[np.bytes_]:
        return fingerprints_of(encode_keys(keys, self._where))
