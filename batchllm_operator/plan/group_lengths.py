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

from batchllm_operator.errors import BatchLLMError, PlanError
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.plan.rows.known_rows import KnownRows
from batchllm_operator.prefixes import PrefixGroups, Requests, SegmentHasher
from batchllm_operator.prefixes.prompt_store import chunks
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import GROUPS_FILE, GROUPS_SCHEMA
from batchllm_operator.stored_plan.plan_file import PlanFile
from batchllm_operator.stored_plan.shard_files import SHARD_SCHEMA
from batchllm_operator.stored_plan.stored_plan import StoredPlan, job_folder

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
            found = places[is_known]
            means[is_known] = -(-self.num_output_tokens[found] // self.num_rows[found])
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
    hasher = SegmentHasher(segment_tokens=_SEGMENT_TOKENS)
    for part in chunks(num_tokens):
        prompt_idxs = requests.prompt_idxs[firsts[part]]
        prefixes = requests.prompts.prefixes(prompt_idxs, num_tokens[part])
        found = hasher.last_hashes(prefixes)
        hashes[chosen[part], 0], hashes[chosen[part], 1] = found[:, 0], found[:, 1]
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


class LearnedGroups:
    """Counts the outputs of an earlier plan's published rows by group."""

    def __init__(self, plan: StoredPlan, columns: pa.Schema) -> None:
        """Read the group of each row.

        Args:
            plan: the plan that published the partition.
            columns: schema of the table that it was published to.

        Raises:
            PlanError: the plan is damaged, or see `KnownRows`.
            pa.ArrowException, OSError: it can't be read, or see `KnownRows`.
        """
        with plan.open_parquet(GROUPS_FILE, GROUPS_SCHEMA, plan.manifest.counts.num_groups) as file:
            self._hashes = file.read()
        self._rows = KnownRows(plan, columns)
        self._group_of_row = _groups_of_rows(plan)
        self._num_rows = np.zeros(self._hashes.num_rows, dtype=np.int64)
        self._num_tokens = np.zeros(self._hashes.num_rows, dtype=np.int64)

    @classmethod
    def find(
        cls, spec: JobSpec, ds: str, plan_id: str, columns: pa.Schema, budget: MemoryBudget | None
    ) -> LearnedGroups | None:
        """The groups of the plan that published partition `ds`.

        None, with a note in the log, if that plan was removed or lacks what is needed.

        Raises:
            SpecError: it is too large for the budget.
        """
        unknown = "partition %s: output lengths are learned without groups: %s"
        try:
            plan = StoredPlan.open(job_folder(spec, ds).child(f"plan-{plan_id}").uri)
        except (BatchLLMError, OSError) as error:
            _log.info(unknown, ds, error)
            return None
        if budget is not None:
            budget.check_learned(plan.manifest.counts.num_rows)
        try:
            return cls(plan, columns)
        # Only an estimate depends on it, so a fault is no reason to stop.
        except (BatchLLMError, OSError, pa.ArrowException) as error:
            _log.info(unknown, ds, error)
            return None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that identify rows."""
        return self._rows.columns

    def add(self, answered: pa.RecordBatch) -> pa.RecordBatch:
        """Count published rows; returns those of the plan, each once.

        Args:
            answered: rows with a text, with `columns` and `num_output_tokens`.
        """
        row_idxs = self._rows.take(answered)
        known = answered.filter(pa.array(row_idxs != _NONE))
        group_ids = self._group_of_row[row_idxs[row_idxs != _NONE]]
        is_grouped = group_ids != _NONE
        np.add.at(self._num_rows, group_ids[is_grouped], 1)
        num_tokens = known.column("num_output_tokens").to_numpy()
        np.add.at(self._num_tokens, group_ids[is_grouped], num_tokens[is_grouped])
        return known

    def lengths(self) -> GroupLengths:
        """The counts, by the hashes of the groups' prefixes."""
        parts = [
            (column.to_numpy(), (column.to_numpy() != _NONE) & (self._num_rows > 0))
            for name in GROUPS_SCHEMA.names
            for column in [self._hashes[name].combine_chunks().fill_null(_NONE)]
        ]
        found, places = np.unique(
            np.concatenate([values[is_known] for values, is_known in parts]), return_inverse=True
        )
        num_rows = np.concatenate([self._num_rows[is_known] for _, is_known in parts])
        num_tokens = np.concatenate([self._num_tokens[is_known] for _, is_known in parts])
        return GroupLengths(
            found, _added(places, num_rows, len(found)), _added(places, num_tokens, len(found))
        )


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


def _added(
    places: npt.NDArray[np.int64], values: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, places, values)
    return totals
