"""Takes answers of some prompts from the published partition, by the keys of rows (`--only`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.errors import PlanError, SpecError, TableError
from batchllm_operator.lake import open_table
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.shards.reuse_index import (
    FINGERPRINT_DTYPE,
    FINGERPRINTS_SCHEMA,
    find_places,
    fingerprints_of,
    from_array,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, FINGERPRINTS_FILE
from batchllm_operator.stored_plan.row_keys import encode_keys
from batchllm_operator.stored_plan.stored_plan import StoredPlan, check_publisher, plan_folder


class PublishedAnswers:
    """Answers to the prompts that a plan doesn't ask again, for rows whose prompts are the same.

    Those of rows that failed aren't taken. A local file has the answers; memory has a digest of
    each row's key, and of its prompts.

    Args:
        only: the prompts that are asked again.
        folder: a local one.

    Raises:
        SpecError: the job has no such prompts, or others have changed.
        TableError: nothing is published, or what another job or program wrote.
        PlanError: the published plan's files are gone.
    """

    def __init__(self, spec: JobSpec, ds: str, only: Sequence[str], folder: Path) -> None:
        if unknown := sorted(set(only) - spec.prompts.keys()):
            raise SpecError(f"--only: the job has no prompt {unknown[0]!r} among several")
        if spec.prompts.keys() == set(only):
            raise SpecError("--only: names all prompts; leave it out")
        self._key = spec.input.key
        self._names = [name for name in spec.prompts if name not in only]
        table = open_table(spec.output.uri, spec.input.partition_column)
        published = check_publisher(table, spec, ds)
        if published is None:
            raise TableError(
                f"table {table.uri}: partition {ds!r} has not been published, so there are no"
                " answers to take; leave --only out"
            )
        plan = StoredPlan.open(plan_folder(spec, published).uri)
        _check_same(spec, plan.manifest.spec, only)
        path, digests, is_whole = folder / "published.arrow", [], []
        snapshot = table.snapshot(ds)
        self.fields = [snapshot.schema.field(name).remove_metadata() for name in self._names]
        with pa.ipc.new_stream(path, pa.schema(self.fields)) as writer:
            for batch in table.scan(snapshot, [*self._key, *self._names]):
                digests.append(self._digests(batch))
                errors = (pc.struct_field(batch.column(name), ERROR_COLUMN) for name in self._names)
                whole = (error.is_null().to_numpy(zero_copy_only=False) for error in errors)
                is_whole.append(np.stack(list(whole), axis=1))
                answers = batch.select(self._names)
                writer.write_batch(answers.cast(pa.schema(self.fields)))
        keys = np.concatenate([np.zeros(0, FINGERPRINT_DTYPE), *digests])
        self._order = np.argsort(keys)
        self._keys = keys[self._order]
        self._fingerprints = self._read_fingerprints(plan, list(spec.prompts), is_whole)
        self._answers = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self._places = list[Int64s]()
        """Of the rows since the last `columns`: [num_rows, prompts], -1 for none."""

    @property
    def num_bytes(self) -> int:
        """Memory of the digests."""
        return int(self._keys.nbytes + self._order.nbytes + self._fingerprints.nbytes)

    def _digests(self, rows: pa.RecordBatch) -> npt.NDArray[np.bytes_]:
        return fingerprints_of(encode_keys(rows.select(self._key), "the published partition"))

    def _read_fingerprints(
        self, plan: StoredPlan, prompts: list[str], is_whole: list[npt.NDArray[np.bool_]]
    ) -> npt.NDArray[np.bytes_]:
        """Of the published rows by prompt, none for answers that aren't taken."""
        known = np.zeros((len(self._keys), len(prompts)), dtype=FINGERPRINT_DTYPE)
        columns = [prompts.index(name) for name in self._names]
        try:
            stored = [self._digests(batch) for batch in plan.row_batches(self._key)]
            num = plan.manifest.counts.num_rows
            with plan.open_parquet(FINGERPRINTS_FILE, FINGERPRINTS_SCHEMA, num) as file:
                read = [from_array(batch.column(0)) for batch in file.iter_batches()]
        except PlanError as error:
            raise PlanError(
                f"{error}; without it, --only can't tell which answers to take: leave it out"
            ) from error
        places = self._rows_of(np.concatenate([self._keys[:0], *stored]))
        fingerprints = np.concatenate([self._keys[:0], *read]).reshape(-1, len(prompts))
        known[places[places >= 0]] = fingerprints[places >= 0]
        taken = np.zeros(known.shape, dtype=np.bool_)
        taken[:, columns] = np.concatenate([taken[:0, columns], *is_whole])
        known[~taken] = b""
        return known

    def _rows_of(self, digests: npt.NDArray[np.bytes_]) -> Int64s:
        """The published row of each key, -1 if there is none."""
        places = find_places(self._keys, digests)
        return np.where(places < 0, -1, self._order[places])

    def take(
        self, rows: pa.RecordBatch, fingerprints: npt.NDArray[np.bytes_], asks: Int64s
    ) -> npt.NDArray[np.bool_]:
        """Which of some asks have a published answer: [num_asks].

        Args:
            rows: of a batch, the next ones.
            asks: int64 [num_asks], numbered from the first of `rows`.
        """
        num = self._fingerprints.shape[1]
        row_of_ask, asked = np.divmod(asks, num)
        published = self._rows_of(self._digests(rows))[row_of_ask]
        is_taken = (published >= 0) & (self._fingerprints[published, asked] == fingerprints)
        places = np.full((rows.num_rows, num), -1, dtype=np.int64)
        places[row_of_ask[is_taken], asked[is_taken]] = published[is_taken]
        self._places.append(places)
        return np.asarray(is_taken)

    def columns(self, prompts: Sequence[str]) -> list[pa.ChunkedArray]:
        """The answers of the rows since the last call, a column for each prompt of `fields`."""
        places = np.concatenate(self._places)
        self._places.clear()
        columns = []
        for name in self._names:
            chosen = places[:, list(prompts).index(name)]
            columns.append(self._answers[name].take(pa.array(chosen, mask=chosen < 0)))
        return columns


def _check_same(spec: JobSpec, published: JobSpec, only: Sequence[str]) -> None:
    if spec.prompts.keys() != published.prompts.keys():
        raise SpecError(
            "--only: the published partition has answers to other prompts; leave --only out"
        )
    for name, prompt in spec.prompts.items():
        if name not in only and prompt != published.prompts[name]:
            raise SpecError(f"--only: prompts.{name} has changed, too; name it, too")
