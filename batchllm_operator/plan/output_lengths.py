"""Estimated output lengths: a constant, a column, or learned from an earlier partition.

Learned is the mean of a group with the same prefix, which its hashes recognise, else of prompts of
about the same length.
"""

import logging
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.lake import LakeTable, Publication, open_table
from batchllm_operator.prefixes import NO_HASH, PrefixGroups, Requests
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.shards.group_lengths import LENGTHS_FILE, LENGTHS_SCHEMA
from batchllm_operator.shards.reuse_index import find_places
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import GROUPS_SCHEMA, LearnedOutputs, LengthBucket
from batchllm_operator.stored_plan.parquet_files import PlanFile
from batchllm_operator.stored_plan.stored_plan import StoredPlan, earlier_publications, plan_folder

_NUM_BUCKETS: Final = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Output lengths of an earlier partition.

    Attributes:
        hashes: int64 [n], ascending, of the prefixes of its groups; empty if they are unknown.
        means: int64 [n], output tokens of the groups with that prefix, rounded up.
    """

    by_length: LearnedOutputs
    hashes: Int64s
    means: Int64s

    def estimates(self, lengths: Int64s, groups: PrefixGroups, prefix_hashes: Int64s) -> Int64s:
        """Estimated output tokens of requests: int64 [num_requests].

        Args:
            lengths: int64 [num_requests], prompt tokens.
            prefix_hashes: int64 [num_groups, 2], see `hash_prefixes`; the first that is known
                decides.
        """
        buckets = self.by_length.buckets
        total = sum(bucket.num_output_tokens for bucket in buckets)
        means = np.full(_NUM_BUCKETS, -(-total // self.by_length.num_rows), dtype=np.int64)
        for bucket in buckets:
            mean = -(-bucket.num_output_tokens // bucket.num_rows)
            means[bucket.min_prompt_tokens.bit_length() - 1] = mean
        estimates: Int64s = means[_bucket(lengths)]
        places = find_places(self.hashes, prefix_hashes[:, 0])
        places = np.where(places < 0, find_places(self.hashes, prefix_hashes[:, 1]), places)
        places = np.repeat(places, groups.sizes)
        is_known = places >= 0
        estimates[groups.member_idxs[is_known]] = self.means[places[is_known]]
        return estimates


def estimate_output_tokens(
    spec: JobSpec,
    requests: Requests,
    learned: Learned | None,
    groups: PrefixGroups,
    prefix_hashes: Int64s | None,
) -> Int64s:
    """Estimated output tokens of each request, in [1, max_tokens]: int64 [num_requests].

    Args:
        learned: None if the spec doesn't ask for it, or there is no earlier partition.
        prefix_hashes: see `Learned.estimates`; None if the spec doesn't ask to learn.
    """
    if requests.output_tokens is not None:
        return requests.output_tokens
    most = spec.sampling.max_tokens
    if learned is not None:
        assert prefix_hashes is not None
        return np.clip(learned.estimates(requests.lengths, groups, prefix_hashes), 1, most)
    constant = spec.planner.estimated_output_tokens
    estimate = min(constant, most) if isinstance(constant, int) else most
    return np.full(len(requests), estimate, dtype=np.int64)


def learn_output_lengths(spec: JobSpec, ds: str, *, by_group: bool = True) -> Learned | None:
    """Learn from the latest partition before `ds` that this job has published, if asked to.

    `lake.before` compares partitions. Those without any text, or of another job or program, don't
    count.

    Args:
        by_group: whether to look for what the commit has noted of groups, too.

    Raises `TableError`: that partition can't be read.
    """
    if not spec.planner.learns_output_tokens:
        return None
    table = open_table(spec.output.uri, spec.input.partition_column)
    for published in earlier_publications(table, spec, ds):
        if buckets := _buckets(table, published.partition):
            hashes, means = np.zeros((2, 0), dtype=np.int64)
            if by_group:
                hashes, means = _known_groups(spec, published)
            by_length = LearnedOutputs(
                ds=published.partition,
                plan_id=published.plan_id,
                buckets=buckets,
                num_known_prefixes=len(hashes),
            )
            return Learned(by_length, hashes, means)
    return None


def _buckets(table: LakeTable, ds: str) -> tuple[LengthBucket, ...]:
    """Counts of the partition's rows with a text, by the length of their prompts."""
    counts = np.zeros((_NUM_BUCKETS, 2), dtype=np.int64)
    names = ["num_prompt_tokens", "num_output_tokens"]
    for batch in table.scan(table.snapshot(ds), [*names, "error"]):
        has_counts = (batch.column(name).is_valid() for name in names)
        answered = batch.filter(reduce(pc.and_, has_counts, batch.column("error").is_null()))
        prompts, outputs = (answered.column(name).to_numpy() for name in names)
        np.add.at(counts, _bucket(prompts), np.column_stack([np.ones_like(outputs), outputs]))
    return tuple(
        LengthBucket(min_prompt_tokens=1 << idx, num_rows=num_rows, num_output_tokens=num_tokens)
        for idx, (num_rows, num_tokens) in enumerate(counts.tolist())
        if num_rows
    )


def _known_groups(spec: JobSpec, published: Publication) -> tuple[Int64s, Int64s]:
    """Hashes of a published plan's groups, ascending, and their mean output tokens, rounded up.

    Empty, with a note in the log, if the plan was removed or its commit has left none.
    """
    fault: object = f"its commit has left no {LENGTHS_FILE}"
    try:
        plan = StoredPlan.open(plan_folder(spec, published).uri)
        with plan.folder.open_file(LENGTHS_FILE) as file:
            where = f"plan {plan.folder.uri}: {LENGTHS_FILE}"
            table = PlanFile(file, where, LENGTHS_SCHEMA).read()
        hashes, num_rows, num_tokens = (column.to_numpy() for column in table.columns)
        return hashes, -(-num_tokens // np.maximum(num_rows, 1))
    except FileNotFoundError:
        pass
    # Only an estimate depends on it, so a fault is no reason to stop.
    except (BatchLLMError, OSError, pa.ArrowException) as error:
        fault = error
    unknown = "partition %s: output lengths are learned without groups: %s"
    _log.info(unknown, published.partition, fault)
    return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _bucket(lengths: Int64s) -> Int64s:
    """Floor of log2 of each length; exact for lengths below 2**53."""
    return np.frexp(np.maximum(lengths, 1).astype(np.float64))[1].astype(np.int64) - 1


def write_groups(path: Path, prefix_hashes: Int64s) -> None:
    """Create a file of hashes, int64 [num_groups, 2], by which later plans recognise the groups."""
    columns = [pa.array(hashes, mask=hashes == NO_HASH) for hashes in prefix_hashes.T]
    pq.write_table(pa.table(columns, schema=GROUPS_SCHEMA), path, compression="zstd")
