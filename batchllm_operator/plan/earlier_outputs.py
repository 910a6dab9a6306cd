"""Reuses outputs of earlier commits, row by row (ADR 20)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import PlanError, TableError
from batchllm_operator.lake import Publication, open_table
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.published import PublishedAnswers
from batchllm_operator.prefixes import TokenTable
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.shards.kept_outputs import KeptOutputs
from batchllm_operator.shards.parts import PART_SCHEMA
from batchllm_operator.shards.reports import find_committed
from batchllm_operator.shards.reuse_index import (
    BYTES_PER_ENTRY,
    FINGERPRINT_DTYPE,
    FINGERPRINTS_SCHEMA,
    INDEX_FILE,
    ReuseIndex,
    fingerprint_array,
    fingerprints_of,
    from_array,
    index_fault,
    index_schema,
    load_fingerprints,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import (
    ERROR_FIELD,
    FINGERPRINTS_FILE,
    REUSED_FILE,
    describe_file,
)
from batchllm_operator.stored_plan.parquet_files import RowGroupWriter
from batchllm_operator.stored_plan.stored_plan import (
    StoredPlan,
    check_publisher,
    earlier_publications,
    plan_folder,
)

_log = logging.getLogger(__name__)
_COPY_BYTES: Final = 1 << 20
_GROUP_FINGERPRINTS: Final = 1 << 16


class Reuse:
    """Writes the prompts' fingerprints and the reused rows while rows are read, from row 0.

    The files in the local folder are `FINGERPRINTS_FILE` and `REUSED_FILE`, with the `schema` of
    parts. Of the indexes, the first that has a prompt decides. In a job of several prompts, rows
    are asks; for `salts` see `reuse_salts`. Answers of the `published` partition come first, and
    outputs that are `kept` for these same rows.
    """

    def __init__(
        self,
        indexes: Sequence[ReuseIndex],
        folder: Path,
        schema: pa.Schema = PART_SCHEMA,
        salts: Sequence[bytes] = (b"",),
        published: PublishedAnswers | None = None,
        kept: KeptOutputs | None = None,
    ) -> None:
        self._indexes, self._folder, self._schema = indexes, folder, schema
        self._salts, self.published, self._kept = salts, published, kept
        self._reuses: list[list[Int64s]] = [[np.zeros((2, 0), np.int64)] for _ in indexes]
        """For each index, arrays of rows and of their places in it: [2, n]."""
        self._num_rows_read = 0
        self.num_rows = 0
        """Rows that reuse an output."""
        path = folder / FINGERPRINTS_FILE
        self._fingerprints = RowGroupWriter(
            path, FINGERPRINTS_SCHEMA, _GROUP_FINGERPRINTS, compression="none", use_dictionary=False
        )

    def __enter__(self) -> Reuse:
        return self

    def __exit__(self, *_: object) -> None:
        self._fingerprints.close()

    @property
    def num_bytes(self) -> int:
        """Memory of the indexes."""
        num_bytes = 0 if self.published is None else self.published.num_bytes
        return num_bytes + sum(index.num_bytes for index in self._indexes)

    def take(
        self,
        tokens: TokenTable,
        row_idxs: Int64s,
        rows: pa.RecordBatch | None = None,
        first_row: int = 0,
    ) -> npt.NDArray[np.bool_]:
        """Look prompts up; returns which have an output already: [num_prompts].

        Args:
            row_idxs: int64 [num_prompts], their rows, ascending and above those of earlier calls.
            rows: the table's rows whose prompts they are, of which `first_row` is the first; for
                published answers.
        """
        questions = (row_idxs % len(self._salts)).tolist()
        fingerprints = fingerprints_of(tokens, map(self._salts.__getitem__, questions))
        num_rows = int(row_idxs[-1]) + 1 if len(row_idxs) else self._num_rows_read
        self._keep(fingerprints, row_idxs, num_rows)
        is_reused = np.zeros(len(row_idxs), dtype=np.bool_)
        if self.published is not None:
            asks = row_idxs - first_row * len(self._salts)
            is_reused = self.published.take(rows, fingerprints, asks)
        if self._kept is not None:
            is_reused |= self._kept.has_output[row_idxs]
        for index, reuses in zip(self._indexes, self._reuses, strict=True):
            places = index.places(fingerprints)
            is_found = (places >= 0) & ~is_reused
            reuses.append(np.stack([row_idxs[is_found], places[is_found]]))
            is_reused |= is_found
        self.num_rows += int(is_reused.sum())
        return is_reused

    def finish(self, num_rows: int) -> None:
        """Complete both files for a partition of `num_rows` rows."""
        self._keep(np.zeros(0, FINGERPRINT_DTYPE), np.zeros(0, np.int64), num_rows)
        self._fingerprints.close()
        num_before = 0
        with RowGroupWriter(self._folder / REUSED_FILE, self._schema, compression="zstd") as writer:
            for table in self._outputs():
                numbers = pa.array(np.arange(num_before, num_before + table.num_rows))
                writer.write(table.add_column(0, self._schema.field(0), numbers))
                num_before += table.num_rows

    def _outputs(self) -> Iterator[pa.Table]:
        """What is reused, as the schema without its first field."""
        if self._kept is not None:
            yield from self._kept.outputs(self._schema.names[1:])
        for index, reuses in zip(self._indexes, self._reuses, strict=True):
            rows, places = np.concatenate(reuses, axis=1)
            yield from _reused(index, rows, places, self._schema)
            reusing = counted(len(rows), "row reuses an output", "rows reuse outputs")
            _log.info("%s of partition %s", reusing, index.ds)

    def _keep(self, fingerprints: npt.NDArray[np.bytes_], row_idxs: Int64s, num_rows: int) -> None:
        """Write fingerprints up to row `num_rows`, with zeros for rows that have none."""
        start, self._num_rows_read = self._num_rows_read, num_rows
        gathered = np.zeros(num_rows - start, dtype=FINGERPRINT_DTYPE)
        gathered[row_idxs - start] = fingerprints
        self._fingerprints.write(
            pa.table([fingerprint_array(gathered)], schema=FINGERPRINTS_SCHEMA)
        )


def find_indexes(
    spec: JobSpec, ds: str, identity: str, budget: MemoryBudget, folder: Path
) -> list[ReuseIndex]:
    """The indexes to reuse: the partition's own, and that of the latest before it.

    Only partitions that this job has published count, and only those with at least one text. An
    index that is missing, altered or of another identity is skipped, with a note in the log.

    Args:
        identity: see `reuse_identity`.
        folder: a local one, for copies that can't change.

    Raises:
        TableError: partition `ds` holds what another job or program wrote.
        SpecError: the fingerprints don't fit into the budget.
        StorageError: the storage fails; planning without reuse would be expensive.
    """
    table = open_table(spec.output.uri, spec.input.partition_column)
    own = check_publisher(table, spec, ds)
    indexes: list[ReuseIndex] = []
    for published in chain(filter(None, [own]), earlier_publications(table, spec, ds)):
        held = budget.holding(sum(index.num_bytes for index in indexes))
        path = folder / f"{len(indexes)}.parquet"
        index = _open_index(spec, published, identity, held, path)
        if index is None or len(index.fingerprints) == 0:
            continue
        indexes.append(index)
        if published != own:
            break
    return indexes


def _open_index(
    spec: JobSpec, published: Publication, identity: str, budget: MemoryBudget, path: Path
) -> ReuseIndex | None:
    """The index of a published plan; None, with a note in the log, if it can't be used."""
    ds, schema = published.partition, index_schema(spec)
    try:
        plan = StoredPlan.open(plan_folder(spec, published).uri)
        fault = _copy_index(plan, path) or index_fault(path, identity, schema)
        num_entries = 0 if fault else pq.read_metadata(path).num_rows
    except (PlanError, TableError, FileNotFoundError, pa.ArrowException) as error:
        fault = str(error)
    if fault is not None:
        _log.warning("partition %s: no outputs are reused: %s", ds, fault)
        return None
    budget.holding(num_entries * BYTES_PER_ENTRY).check(0)
    fingerprints = load_fingerprints(path)
    fingerprints.sort()
    return ReuseIndex(ds, path, fingerprints, schema)


def _copy_index(plan: StoredPlan, path: Path) -> str | None:
    """Copy the index of a committed plan; returns what is wrong with it, or None."""
    committed = find_committed(plan)
    if committed is None:
        return f"plan {plan.folder.uri} isn't marked as committed"
    if committed.reuse_sha256 is None:
        return f"plan {plan.folder.uri} was committed without reuse_outputs"
    with plan.folder.open_file(INDEX_FILE) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
    if describe_file(path).sha256 != committed.reuse_sha256:
        return f"{plan.folder.uri}/{INDEX_FILE} is corrupted: its checksum doesn't hold"
    return None


def _reused(
    index: ReuseIndex, row_idxs: Int64s, places: Int64s, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Outputs of the index with the rows that reuse them, as `schema` without its first field.

    Args:
        row_idxs: int64 [n], the rows, ascending.
        places: int64 [n], each row's place in the index.
    """
    by_place = np.argsort(places, kind="stable")
    row_idxs = row_idxs[by_place]
    num_rows = np.bincount(places, minlength=len(index.fingerprints))
    ends = np.cumsum(num_rows)
    for batch in index.outputs():
        place = index.places(from_array(batch.column("fingerprint")))
        firsts = np.sort(np.unique(place, return_index=True)[1])  # each output once
        chosen = firsts[num_rows[place[firsts]] > 0]
        lengths = num_rows[place[chosen]]
        num_rows[place[chosen]] = 0
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        first = np.repeat(ends[place[chosen]] - lengths - offsets[:-1], lengths)
        of_entry = row_idxs[first + np.arange(offsets[-1])]
        outputs = batch.take(pa.array(chosen))
        num_prompt_tokens = outputs.column("num_prompt_tokens")
        columns = {name: outputs.column(name) for name in outputs.schema.names}
        columns |= {
            "row_idxs": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(of_entry)),
            "num_cached_tokens": num_prompt_tokens,  # as for all rows without computation
            "error": pa.nulls(len(chosen), ERROR_FIELD.type),
        }
        yield pa.table({name: columns[name] for name in schema.names[1:]}, schema=schema.remove(0))
