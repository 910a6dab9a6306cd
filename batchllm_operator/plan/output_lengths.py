"""Estimated output lengths: a constant, a column, or learned from an earlier partition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from batchllm_operator.lake import LakeTable, Publication, open_table
from batchllm_operator.plan.group_lengths import GroupLengths, PlanGroups
from batchllm_operator.plan.memory import MemoryBudget
from batchllm_operator.prefixes import PrefixGroups, Requests
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import LearnedOutputs, LengthBucket
from batchllm_operator.stored_plan.publications import earlier_publications

_NUM_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Learned:
    """Output lengths of an earlier partition."""

    by_length: LearnedOutputs
    by_group: GroupLengths | None
    """None if the groups of its rows are unknown."""


def estimate_output_tokens(
    spec: JobSpec,
    requests: Requests,
    learned: Learned | None,
    groups: PrefixGroups,
    prefix_hashes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Estimated output tokens of each request, in [1, max_tokens]: int64 [num_requests].

    Learned estimates are the mean of earlier outputs of a group with the same prefix, else of
    prompts of about the same length.

    Args:
        learned: None if the spec doesn't ask for it, or there is no earlier partition.
        prefix_hashes: int64 [num_groups, 2], see `hash_prefixes`; unused if nothing was learned.
    """
    if requests.output_tokens is not None:
        return requests.output_tokens
    most = spec.sampling.max_tokens
    if learned is None:
        constant = spec.planner.estimated_output_tokens
        estimate = min(constant, most) if isinstance(constant, int) else most
        return np.full(len(requests), estimate, dtype=np.int64)
    estimates = _mean_tokens(learned.by_length)[_bucket(requests.lengths)]
    if learned.by_group is not None:
        of_group = learned.by_group.mean_tokens(prefix_hashes)
        is_known = np.repeat(of_group >= 0, groups.sizes)
        estimates[groups.member_idxs[is_known]] = np.repeat(of_group, groups.sizes)[is_known]
    return np.clip(estimates, 1, most)


def learn_output_lengths(
    spec: JobSpec, ds: str, budget: MemoryBudget | None = None
) -> Learned | None:
    """Learn from the latest partition before `ds` that this job has published, if asked to.

    `lake.before` compares partitions. Those without any text, or of another job or program, don't
    count, nor do rows that aren't in the plan that published them.

    Raises:
        TableError: that partition can't be read.
        SpecError: it is too large to learn from within the budget.
    """
    if not spec.planner.learns_output_tokens:
        return None
    table = open_table(spec.output.uri, spec.input.partition_column)
    for published in earlier_publications(table, spec, ds):
        if (learned := _learn(spec, table, published, budget)) is not None:
            return learned
    return None


def _learn(
    spec: JobSpec, table: LakeTable, published: Publication, budget: MemoryBudget | None
) -> Learned | None:
    """Count the partition's rows with a text, by prompt length and by group; None without any.

    If the groups are known, rows that their plan lacks are skipped, and copies of a row.
    """
    snapshot = table.snapshot(published.partition)
    groups = PlanGroups.find(spec, published, snapshot.schema, budget)
    lengths, places = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    columns = ["num_prompt_tokens", "num_output_tokens", "error"]
    for batch in table.scan(snapshot, [*columns, *(groups.key if groups else ())]):
        has_counts = (batch.column(name).is_valid() for name in columns[:2])
        answered = batch.filter(reduce(pc.and_, has_counts, batch.column("error").is_null()))
        lengths.append(np.column_stack([answered.column(name).to_numpy() for name in columns[:2]]))
        if groups is not None:
            places.append(groups.places(answered))
    prompts, outputs = np.concatenate(lengths).T
    by_group = None
    if groups is not None:
        distinct, firsts = np.unique(np.concatenate(places), return_index=True)
        firsts = firsts[distinct >= 0]
        prompts, outputs = prompts[firsts], outputs[firsts]
        by_group = groups.lengths(distinct[distinct >= 0], outputs)
    if len(prompts) == 0:
        return None
    buckets = _bucket(prompts)
    by_length = LearnedOutputs(
        ds=published.partition,
        plan_id=published.plan_id,
        buckets=tuple(
            LengthBucket(
                min_prompt_tokens=1 << int(bucket),
                num_rows=int(np.count_nonzero(buckets == bucket)),
                num_output_tokens=int(outputs[buckets == bucket].sum()),
            )
            for bucket in np.unique(buckets)
        ),
        num_known_prefixes=0 if by_group is None else len(by_group.hashes),
    )
    return Learned(by_length, by_group)


def _bucket(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Floor of log2 of each length; exact for lengths below 2**53."""
    return np.frexp(np.maximum(lengths, 1).astype(np.float64))[1].astype(np.int64) - 1


def _mean_tokens(learned: LearnedOutputs) -> npt.NDArray[np.int64]:
    """Mean output tokens of each bucket, rounded up; that of all rows for an empty bucket."""
    total = sum(bucket.num_output_tokens for bucket in learned.buckets)
    means = np.full(_NUM_BUCKETS, -(-total // learned.num_rows), dtype=np.int64)
    for bucket in learned.buckets:
        mean = -(-bucket.num_output_tokens // bucket.num_rows)
        means[bucket.min_prompt_tokens.bit_length() - 1] = mean
    return means
