"""From requests to shards: chooses groups, their order and their shards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.artifacts.manifest import CostEstimate, ShardInfo
from batchllm_operator.artifacts.shard_files import shard_file, write_shard
from batchllm_operator.plan.estimate import Target, estimate_cost, group_costs, work_costs
from batchllm_operator.plan.group_lengths import hash_prefixes
from batchllm_operator.plan.neighbours import side_by_side
from batchllm_operator.plan.output_lengths import Learned, estimate_output_tokens
from batchllm_operator.planner import (
    PrefixGroups,
    RankedPrompts,
    Requests,
    assign_shards,
    choose_prefixes,
    group_prefill_tokens,
    imbalance,
    order_groups_by_subtree,
    split_large_groups,
)
from batchllm_operator.planner.prefixes.search import Advance
from batchllm_operator.progress import Progress
from batchllm_operator.spec import JobSpec

if TYPE_CHECKING:
    from batchllm_operator.plan.replicas import ReplicaPlanner

_log = logging.getLogger(__name__)
_WORTH_A_WARNING: Final = 1.2  # imbalance
_STEPS: Final = ("tree built", "prefixes chosen", "outputs estimated", "groups ordered")


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The groups in the order of the plan, with numbers from their tree."""

    groups: PrefixGroups
    output_tokens: npt.NDArray[np.int64]
    """int64 [num_requests], estimates."""
    prefix_hashes: npt.NDArray[np.int64]
    """int64 [num_groups, 2], see `hash_prefixes`; [0, 2] if nothing is to be learned."""
    num_optimal_tokens: int
    num_algorithm_1_saved_tokens: int
    num_exact_saved_tokens: int


def arrange(
    spec: JobSpec,
    requests: Requests,
    ranked: RankedPrompts,
    learned: Learned | None,
    target: Target | None,
    max_model_len: int,
) -> Arrangement:
    """Choose the groups, cut those too large for one shard, and sort them for scheduling.

    The order is that of Eq. 4, with subtrees kept together (ADR 8).

    Args:
        ranked: the requests' prompts in order.
        learned: output lengths from an earlier partition.
        target: groups are cut by this GPU's time; None to cut by tokens.
        max_model_len: upper bound of a prompt with its output.
    """
    with Progress("choose and order groups", len(_STEPS), unit="steps", announce=False) as progress:
        tree = ranked.tree(requests.lengths)
        progress.advance(1, _STEPS[0])
        choice = choose_prefixes(tree)
        groups = choice.groups
        progress.advance(1, _STEPS[1])
        prefix_hashes = np.zeros((0, 2), dtype=np.int64)
        if spec.planner.learns_output_tokens:
            prefix_hashes = hash_prefixes(requests, groups)
        output_tokens = np.minimum(
            estimate_output_tokens(spec, requests, learned, groups, prefix_hashes),
            max_model_len - requests.lengths,
        )
        progress.advance(1, _STEPS[2])
        if len(groups):
            costs = work_costs(target, groups, requests.lengths, output_tokens)
            parts = split_large_groups(groups, *costs, spec.planner.num_shards)
            order = order_groups_by_subtree(parts, tree, output_tokens)
            if len(prefix_hashes):  # the parts of a group are neighbours
                group_of_part = np.searchsorted(groups.offsets, parts.offsets[:-1], "right") - 1
                prefix_hashes = prefix_hashes[group_of_part][order]
            groups = parts.take(order)
        progress.advance(1, _STEPS[3])
    return Arrangement(
        groups,
        output_tokens,
        prefix_hashes,
        tree.num_distinct_prefix_tokens,
        choice.algorithm_1_saved_tokens,
        choice.exact_saved_tokens,
    )


@dataclass(frozen=True, slots=True)
class WrittenShards:
    """The shards of a plan, in order."""

    infos: tuple[ShardInfo, ...]
    imbalance: float
    estimate: CostEstimate | None
    """For all shards together."""


def write_shards(
    spec: JobSpec,
    requests: Requests,
    arrangement: Arrangement,
    target: Target | None,
    replicas: ReplicaPlanner | None,
    scratch: Path,
) -> WrittenShards:
    """Distribute the groups, in their order, over shards of about equal work, and write them.

    Args:
        target: shards are balanced by this GPU's time; None to balance by tokens.
        replicas: places the groups of each shard; None with one replica.
        scratch: folder for the files.
    """
    groups, output_tokens = arrangement.groups, arrangement.output_tokens
    prefill = group_prefill_tokens(groups, requests.lengths)
    costs = group_costs(groups, *work_costs(target, groups, requests.lengths, output_tokens))
    shard_of_group, worst = _deal_out(costs, spec.planner.num_shards)
    estimated = estimate_cost(
        target, requests, output_tokens, groups, shard_of_group, spec.engine.replicas
    )
    estimate, gpu_s = estimated or (None, None)
    if len(groups) == 0:
        return WrittenShards((), worst, estimate)
    shards = []
    ids_of_shard = [
        np.flatnonzero(shard_of_group == idx) for idx in range(shard_of_group.max() + 1)
    ]
    all_parts = _write_files(spec, requests, arrangement, ids_of_shard, scratch)
    for shard_idx, (ids, num_parts) in enumerate(zip(ids_of_shard, all_parts, strict=True)):
        taken, placement = groups.take(ids), None
        if replicas is not None:
            placement = replicas.place(taken, requests.lengths, output_tokens, costs[ids], ids)
            if placement is not None and placement.measure:  # one shard's run measures
                replicas = replace(replicas, wants_profile=False)
        shards.append(
            ShardInfo(
                file=shard_file(shard_idx),
                num_groups=len(taken),
                num_requests=taken.num_prompts,
                num_rows=int(requests.num_rows[taken.member_idxs].sum()),
                num_parts=num_parts,
                num_prefill_tokens=int(prefill[ids].sum()),
                predicted_gpu_s=None if gpu_s is None else float(gpu_s[shard_idx]),
                replicas=placement,
            )
        )
    return WrittenShards(tuple(shards), worst, estimate)


def _write_files(
    spec: JobSpec,
    requests: Requests,
    arrangement: Arrangement,
    ids_of_shard: Sequence[npt.NDArray[np.int64]],
    scratch: Path,
) -> list[int]:
    """Write the groups of each shard to its file; returns the number of parts of each."""
    shards = [arrangement.groups.take(ids) for ids in ids_of_shard]
    starts = np.cumsum([0, *(shard.num_prompts for shard in shards)])

    def write(shard_idx: int, written: Advance) -> int:
        shard = shards[shard_idx]
        return write_shard(
            scratch / shard_file(shard_idx),
            requests,
            request_idx_start=int(starts[shard_idx]),
            request_idxs=shard.member_idxs,
            group_ids=np.repeat(ids_of_shard[shard_idx], shard.sizes),
            num_prefix_tokens=np.repeat(shard.num_prefix_tokens, shard.sizes),
            num_output_tokens=arrangement.output_tokens[shard.member_idxs],
            part_rows=spec.planner.part_rows,
            written=written,
        )

    with Progress("write shards", int(starts[-1]), unit="requests", announce=False) as progress:
        return side_by_side(write, len(shards), progress.advance)


def _deal_out(
    costs: npt.NDArray[np.float64], num_shards: int
) -> tuple[npt.NDArray[np.int64], float]:
    """The shard of each group, and the shards' imbalance. No shard is empty."""
    num_shards = max(1, min(num_shards, len(costs)))
    shard_of_group = assign_shards(costs, num_shards)
    worst = imbalance(costs, shard_of_group, num_shards)
    if worst > _WORTH_A_WARNING:
        _log.warning("the largest shard has %.2f times the average work", worst)
    return shard_of_group, worst
