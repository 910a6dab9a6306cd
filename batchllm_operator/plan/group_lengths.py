"""Output lengths by group, learned from earlier outputs with the same prefix.

A hash of its prefix identifies a group. The prefix's exact end depends on how the group's prompts
continue, so the hashes are taken at the ends of segments of 64 tokens: of the last one inside the
prefix, and of the one before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import BatchLLMError, PlanError, SpecError
from batchllm_operator.lake import Publication
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.prefixes import PrefixGroups, Requests, last_hashes
from batchllm_operator.prefixes.prompt_store import chunks
from batchllm_operator.shards.reuse_index import (
    FINGERPRINT_DTYPE,
    Fingerprints,
    find_places,
    fingerprints_of,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import GROUPS_FILE, GROUPS_SCHEMA
from batchllm_operator.stored_plan.plan_file import PlanFile
from batchllm_operator.stored_plan.row_keys import encode_keys
from batchllm_operator.stored_plan.shard_files import SHARD_SCHEMA
from batchllm_operator.stored_plan.stored_plan import StoredPlan, plan_folder

_SEGMENT_TOKENS: Final = 64
_NONE: Final = -1
_BATCH_ROWS: Final = 1 << 16
_READ_SCHEMA: Final = pa.schema([SHARD_SCHEMA.field("group_id"), SHARD_SCHEMA.field("row_idxs")])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class GroupLengths:
    """Output lengths by hash of the group's prefix.

    Attributes:
        hashes: [n] int64, ascending.
        num_rows: [n] int64, rows with a text, at least 1.
        num_output_tokens: [n] int64, their sum.
    """

    hashes: npt.NDArray[np.int64]
    num_rows: npt.NDArray[np.int64]
    num_output_tokens: npt.NDArray[np.int64]

    def mean_tokens(self, prefix_hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Mean output tokens of each group, rounded up; -1 if neither hash is known.

        Args:
            prefix_hashes: [num_groups, 2] int64, see `hash_prefixes`; the first that is known
                decides.
        """
        means = np.full(len(prefix_hashes), _NONE, dtype=np.int64)
        if len(self.hashes) == 0:
            return means
        for column in (1, 0):
            wanted = prefix_hashes[:, column]
            places = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
            is_known = (self.hashes[places] == wanted) & (wanted != _NONE)
            known = places[is_known]
            means[is_known] = -(-self.num_output_tokens[known] // self.num_rows[known])
        return means


def hash_prefixes(requests: Requests, groups: PrefixGroups) -> npt.NDArray[np.int64]:
    """Hashes of each group's prefix: to the end of its last full segment, and of the one before.

    Returns:
        int64 [num_groups, 2], -1 where there is no such segment, as in groups of one.
    """
    hashes = np.full((len(groups), 2), _NONE, dtype=np.int64)
    num_segments = groups.num_prefix_tokens // _SEGMENT_TOKENS
    chosen = np.flatnonzero(num_segments)
    firsts = groups.member_idxs[groups.offsets[chosen]]
    num_tokens = num_segments[chosen] * _SEGMENT_TOKENS
    for part in chunks(num_tokens):
        prompt_idxs = requests.prompt_idxs[firsts[part]]
        prefixes = requests.prompts.slices(prompt_idxs, 0, num_tokens[part])
        hashes[chosen[part]] = last_hashes(prefixes, _SEGMENT_TOKENS)
    return hashes


def write_groups(path: Path, prefix_hashes: npt.NDArray[np.int64]) -> None:
    """Write the hashes, by which later plans identify the groups.

    Args:
        path: a file to create.
        prefix_hashes: int64 [num_groups, 2], in the order of the plan.
    """
    columns = [
        pa.array(prefix_hashes[:, column], mask=prefix_hashes[:, column] == _NONE)
        for column in (0, 1)
    ]
    pq.write_table(pa.table(columns, schema=GROUPS_SCHEMA), path, compression="zstd")


@dataclass(frozen=True, slots=True, eq=False)
class PlanGroups:
    """The groups of a plan, by the keys of its rows.

    Positions don't identify rows: since they were published, some may have been deleted, added or
    sorted. Takes 25 bytes of memory per row, and twice as much while reading.

    Attributes:
        key: names of the key columns.
        hashes: int64 [num_groups, 2], see `hash_prefixes`.
        digests: [num_rows], of the rows' keys, ascending.
        group_ids: int64 [num_rows], in the order of `digests`; -1 for rows without a prompt.
    """

    key: tuple[str, ...]
    hashes: npt.NDArray[np.int64]
    digests: Fingerprints
    group_ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: StoredPlan, columns: pa.Schema) -> PlanGroups:
        """Read the group of each row.

        Args:
            plan: its keys are unique.
            columns: schema of the table that it was published to. Formats change types, so keys
                are compared in the table's types.

        Raises:
            PlanError: the plan is damaged, or the table lacks a key column.
            pa.ArrowException, OSError: it can't be read, or keys can't be of the table's types.
        """
        key, counts = plan.manifest.spec.input.key, plan.manifest.counts
        if missing := set(key).difference(columns.names):
            raise PlanError(f"the table has no column {min(missing)!r} any more")
        if GROUPS_FILE not in plan.manifest.files:
            raise PlanError("its plan was made without planner.estimated_output_tokens: learned")
        with plan.open_parquet(GROUPS_FILE, GROUPS_SCHEMA, counts.num_groups) as file:
            stored = file.read()
        hashes = [stored[name].fill_null(_NONE).to_numpy() for name in GROUPS_SCHEMA.names]
        digests = [np.zeros(0, dtype=FINGERPRINT_DTYPE)]
        # Checksums aren't verified: most of a file may be carried columns, which aren't read.
        wanted = pa.schema([columns.field(name) for name in key])
        for rows in plan.manifest.row_files:
            with plan.folder.open_file(rows.file, read_ahead=False) as file:
                digests += map(_digests, read_batches(file, wanted, {}))
        by_row = np.concatenate(digests)
        if len(by_row) != counts.num_rows:
            raise PlanError(
                f"plan {plan.folder.uri}: its rows are {len(by_row)}, not {counts.num_rows}"
            )
        order = np.argsort(by_row)
        return cls(key, np.column_stack(hashes), by_row[order], _groups_of_rows(plan)[order])

    @classmethod
    def find(
        cls, spec: JobSpec, published: Publication, columns: pa.Schema, budget: MemoryBudget | None
    ) -> PlanGroups | None:
        """The groups of the plan that published a partition.

        None, with a note in the log, if that plan was removed or lacks what is needed.

        Raises:
            SpecError: it is too large for the budget.
        """
        try:
            plan = StoredPlan.open(plan_folder(spec, published).uri)
            if budget is not None:
                budget.check_learned(plan.manifest.counts.num_rows)
            return cls.of(plan, columns)
        except SpecError:
            raise
        # Only an estimate depends on it, so a fault is no reason to stop.
        except (BatchLLMError, OSError, pa.ArrowException) as error:
            unknown = "partition %s: output lengths are learned without groups: %s"
            _log.info(unknown, published.partition, error)
            return None

    def places(self, rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """The place of each published row in `digests`, -1 for a row that the plan lacks."""
        keys = rows.select(self.key)
        is_whole = np.ones(rows.num_rows, dtype=np.bool_)  # nulls are encoded like empty texts
        for column in keys.columns:
            is_whole &= column.is_valid().to_numpy(zero_copy_only=False)
        return np.where(is_whole, find_places(self.digests, _digests(keys)), _NONE)

    def lengths(
        self, places: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> GroupLengths:
        """Output lengths of rows by the hashes of their groups' prefixes.

        Args:
            places: int64 [n], of the rows in `digests`, each once.
            num_tokens: int64 [n], of their outputs.
        """
        group_ids = self.group_ids[places]
        is_grouped = group_ids != _NONE
        of_groups = _sums(group_ids[is_grouped], num_tokens[is_grouped], len(self.hashes))
        is_known = (self.hashes != _NONE) & (of_groups[0] > 0)[:, None]
        hashes, idxs = np.unique(self.hashes[is_known], return_inverse=True)
        groups = np.nonzero(is_known)[0]
        num_rows, num_tokens = (_sums(idxs, sums[groups], len(hashes))[1] for sums in of_groups)
        return GroupLengths(hashes, num_rows, num_tokens)


def _digests(keys: pa.RecordBatch) -> Fingerprints:
    return fingerprints_of(encode_keys(keys, "the plan's rows"))


def _sums(
    idxs: npt.NDArray[np.int64], values: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often each index occurs, and the sum of its values, below 2**53."""
    sums = np.bincount(idxs, values, size).astype(np.int64)
    return np.bincount(idxs, minlength=size).astype(np.int64), sums


def _groups_of_rows(plan: StoredPlan) -> npt.NDArray[np.int64]:
    """The group of each row: int64 [num_rows], -1 for rows without a prompt."""
    num_rows, num_groups = plan.manifest.counts.num_rows, plan.manifest.counts.num_groups
    group_of_row = np.full(num_rows, _NONE, dtype=np.int64)
    for shard in plan.manifest.shards:
        # The checksum isn't verified: most of the file is prompts, which aren't read.
        with plan.folder.open_file(shard.file, read_ahead=False) as file:
            where = f"plan {plan.folder.uri}: {shard.file}"
            requests = PlanFile(file, where, _READ_SCHEMA, shard.num_requests)
            for batch in requests.iter_batches(_BATCH_ROWS, columns=_READ_SCHEMA.names):
                rows = batch.column("row_idxs")
                group_ids = batch.column("group_id").to_numpy(zero_copy_only=False)
                row_idxs = rows.flatten().to_numpy(zero_copy_only=False)
                sizes = rows.value_lengths().fill_null(0).to_numpy()
                if not (_is_within(group_ids, num_groups) and _is_within(row_idxs, num_rows)):
                    raise PlanError(f"{where} is damaged")
                group_of_row[row_idxs] = np.repeat(group_ids, sizes)
    return group_of_row


def _is_within(idxs: npt.NDArray[np.int64], size: int) -> bool:
    """Whether all are indexes into an array of that size; nulls, as NaN, aren't."""
    return bool(np.all((idxs >= 0) & (idxs < size)))
