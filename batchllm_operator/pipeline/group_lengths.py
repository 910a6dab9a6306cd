"""Output lengths by group: what an earlier run's answers to the same document say.

A group is known again by a hash of its prefix. Where exactly a prefix ends depends on what the
group's prompts go on with, so the hashes are taken where whole segments of 64 tokens end: at the
last one inside the prefix, and at the one before.
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
from batchllm_operator.lake import LakeTable
from batchllm_operator.pipeline.memory import MemoryBudget
from batchllm_operator.pipeline.plan_file import PlanFile
from batchllm_operator.pipeline.stored_plan import StoredPlan, job_folder
from batchllm_operator.planner import PrefixGroups, Requests, SegmentHasher
from batchllm_operator.planner.plan import GROUPS_FILE, GROUPS_SCHEMA, SHARD_SCHEMA
from batchllm_operator.planner.prompt_store import chunks
from batchllm_operator.spec import JobSpec

_SEGMENT_TOKENS: Final = 64
_NONE: Final = -1
_BATCH_ROWS: Final = 1 << 16
_READ_SCHEMA: Final = pa.schema([SHARD_SCHEMA.field("group_id"), SHARD_SCHEMA.field("row_idxs")])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class GroupLengths:
    """Answers by hash of their group's prefix.

    Attributes:
        hashes: [n] int64, ascending.
        num_rows: [n] int64, rows with a text, at least 1.
        num_output_tokens: [n] int64, all of theirs.
    """

    hashes: npt.NDArray[np.int64]
    num_rows: npt.NDArray[np.int64]
    num_output_tokens: npt.NDArray[np.int64]

    def mean_tokens(self, prefix_hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Mean output tokens of each group, rounded up; -1 where no prefix is known.

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
    """Hashes of each group's prefix: at its last full segment, and at the one before.

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
        prefixes = requests.prompts.beginnings(prompt_idxs, num_tokens[part])
        found = hasher.last_hashes(prefixes)
        hashes[chosen[part], 0], hashes[chosen[part], 1] = found[:, 0], found[:, 1]
    return hashes


def write_groups(path: Path, prefix_hashes: npt.NDArray[np.int64]) -> None:
    """Write what later plans know the groups by.

    Args:
        path: a file to create.
        prefix_hashes: int64 [num_groups, 2], in the order of the plan.
    """
    columns = [
        pa.array(prefix_hashes[:, column], mask=prefix_hashes[:, column] == _NONE)
        for column in (0, 1)
    ]
    pq.write_table(pa.table(columns, schema=GROUPS_SCHEMA), path, compression="zstd")


def learn_group_lengths(
    spec: JobSpec, table: LakeTable, ds: str, plan_id: str, budget: MemoryBudget | None = None
) -> GroupLengths | None:
    """What partition `ds` says about the groups of the plan that it was published by.

    None, with a note in the log, if that plan was removed or didn't keep what is needed.

    Raises:
        SpecError: it is too large for the budget.
    """
    try:
        plan = StoredPlan.open(job_folder(spec, ds).child(f"plan-{plan_id}").uri)
        num_rows = plan.manifest.counts.num_rows
    except (BatchLLMError, OSError) as error:
        _log.info("partition %s: output lengths are learned without groups: %s", ds, error)
        return None
    if budget is not None:
        budget.check_learned(num_rows)
    try:
        with plan.open_parquet(GROUPS_FILE, GROUPS_SCHEMA, plan.manifest.counts.num_groups) as file:
            hashes = file.read()
        group_of_row = _groups_of_rows(plan)
    # Only an estimate depends on it, so what is wrong with it is no reason to stop.
    except (BatchLLMError, OSError, pa.ArrowException) as error:
        _log.info("partition %s: output lengths are learned without groups: %s", ds, error)
        return None
    num_texts, num_tokens = _count(table, ds, group_of_row, hashes.num_rows)
    parts = [
        (column.to_numpy(), is_known)
        for name in GROUPS_SCHEMA.names
        for column in [hashes[name].combine_chunks().fill_null(_NONE)]
        for is_known in [(column.to_numpy() != _NONE) & (num_texts > 0)]
    ]
    found, places = np.unique(
        np.concatenate([values[is_known] for values, is_known in parts]), return_inverse=True
    )
    return GroupLengths(
        found,
        _added(places, np.concatenate([num_texts[is_known] for _, is_known in parts]), len(found)),
        _added(places, np.concatenate([num_tokens[is_known] for _, is_known in parts]), len(found)),
    )


def _groups_of_rows(plan: StoredPlan) -> npt.NDArray[np.int64]:
    """The group of each row: int64 [num_rows], -1 for rows that couldn't be prompted."""
    num_rows, num_groups = plan.manifest.counts.num_rows, plan.manifest.counts.num_groups
    group_of_row = np.full(num_rows, _NONE, dtype=np.int64)
    for shard in plan.manifest.shards:
        # Not its checksum: most of the file is prompts, which aren't read.
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
    """Whether all are places in an array of that size; nulls, as NaN, aren't."""
    return bool(np.all((idxs >= 0) & (idxs < size)))


def _count(
    table: LakeTable, ds: str, group_of_row: npt.NDArray[np.int64], num_groups: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows with a text, and their output tokens, of each group."""
    num_rows = np.zeros(num_groups, dtype=np.int64)
    num_tokens = np.zeros(num_groups, dtype=np.int64)
    start = 0
    for batch in table.scan(table.snapshot(ds), ["num_output_tokens", "error"]):
        group_ids = group_of_row[start : start + batch.num_rows]
        start += batch.num_rows
        counts = (group_ids != _NONE) & batch.column("error").is_null().to_numpy(False)
        np.add.at(num_rows, group_ids[counts], 1)
        output_tokens = batch.column("num_output_tokens").fill_null(0).to_numpy(False)
        np.add.at(num_tokens, group_ids[counts], output_tokens[counts])
    return num_rows, num_tokens


def _added(
    places: npt.NDArray[np.int64], values: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, places, values)
    return totals
