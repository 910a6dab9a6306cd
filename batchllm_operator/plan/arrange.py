"""From requests to shards: chooses groups, cuts shards, and orders the groups of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.cost import BLOCK_SIZE, WorkArrays, prompt_work
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.plan.estimate import Target, work_costs
from batchllm_operator.plan.group_lengths import hash_prefixes
from batchllm_operator.plan.output_lengths import Learned, estimate_output_tokens
from batchllm_operator.prefixes import (
    PrefixGroups,
    PrefixTree,
    PromptClasses,
    RankedPrompts,
    Requests,
    choose_prefixes,
    cut_into_shards,
    order_groups_by_subtree,
    split_groups,
)
from batchllm_operator.progress import Progress
from batchllm_operator.spec import JobSpec

_SHARD_S: Final = 120.0
"""Short, so that workers end at about the same time; long beside the second that a claim takes."""
_SHARD_TOKENS: Final = 1e6
"""A 7B model on an A100 takes about two minutes for them, by the roofline."""
_MOST_SHARDS: Final = 1000
"""Unless the spec asks for more: each is a file, which each worker looks up."""
_STEPS: Final = ("tree built", "prefixes chosen", "outputs estimated", "shards cut")


def usual_num_shards(cost: float, target: Target | None) -> int:
    """Shards of a plan whose spec doesn't say how many: each of two minutes, or a million tokens.

    At least 1 and at most 1,000, so those of very large jobs take longer. The number of workers
    doesn't count: it may differ from run to run of one plan.

    Args:
        cost: of all requests, by `work_costs`: nanoseconds of GPUs; without a target, tokens.
        target: the GPU that the cost is for.
    """
    per_shard = _SHARD_TOKENS
    if target is not None:
        per_shard = _SHARD_S * 1e9 * target.balance_limits.num_gpus
    return min(max(math.ceil(cost / per_shard), 1), _MOST_SHARDS)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Requests in lexicographic order, cut into shards.

    Attributes:
        request_idxs: int64 [num_requests], by rank.
        bounds: int64 [num_shards + 1], ranks, from 0 to num_requests; no shard is empty.
        costs: float64 [num_requests], by request, by which shards are balanced.
        shard_costs: float64 [num_shards], their sums.
        work: by rank, with what a shard's engine finds in its cache left out.
        num_optimal_tokens: prefill tokens if there were one shard only.
    """

    request_idxs: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    shard_costs: npt.NDArray[np.float64]
    work: WorkArrays
    num_optimal_tokens: int

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        requests: Requests,
        ranked: RankedPrompts,
        decode_tokens: npt.NDArray[np.int64],
        target: Target | None,
    ) -> Cut:
        """Cut shards of about equal work, where neighbours share little.

        Args:
            ranked: the requests' prompts in order.
            decode_tokens: int64 [num_requests], estimates.
            target: shards are balanced by this GPU's time; None to balance by tokens.
        """
        idxs = ranked.prompt_idxs
        lengths, outputs = requests.lengths[idxs], decode_tokens[idxs]
        # Not the spec's blocks: tuning of the engine must not change shards.
        usual = ranked.cached_tokens(requests.lengths, BLOCK_SIZE)
        costs, cut_costs = work_costs(target, lengths, outputs, usual)
        num_shards = spec.planner.num_shards
        if num_shards is None:
            num_shards = usual_num_shards(float(costs.sum()), target)
        bounds = cut_into_shards(costs, cut_costs, num_shards)
        firsts = bounds[:-1]
        costs[firsts] += cut_costs[firsts]
        del usual, cut_costs  # a plan may have millions of requests
        cached = ranked.cached_tokens(requests.lengths, block_size_of(spec))
        num_optimal = int((lengths - cached).sum())
        cached[firsts] = 0
        by_request = np.empty_like(costs)
        by_request[idxs] = costs
        work = prompt_work(lengths, outputs, cached)
        shard_costs = np.add.reduceat(costs, firsts)
        return cls(idxs, bounds, by_request, shard_costs, work, num_optimal)

    @property
    def shard_of_request(self) -> npt.NDArray[np.int64]:
        """int64 [num_requests], by request."""
        shards = np.empty(len(self.request_idxs), dtype=np.int64)
        shards[self.request_idxs] = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))
        return shards


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The groups in the order of the plan, shard after shard."""

    groups: PrefixGroups
    group_bounds: npt.NDArray[np.int64]
    """int64 [num_shards + 1]: shard s has the groups [group_bounds[s], group_bounds[s + 1])."""
    cut: Cut
    output_tokens: npt.NDArray[np.int64]
    """int64 [num_requests], estimates."""
    decode_tokens: npt.NDArray[np.int64]
    """int64 [num_requests]: those that take decode steps; 0 in a job without decode."""
    prefix_hashes: npt.NDArray[np.int64]
    """int64 [num_groups, 2], see `hash_prefixes`; [0, 2] if nothing is to be learned."""
    num_algorithm_1_saved_tokens: int
    num_exact_saved_tokens: int

    def shard_groups(self) -> list[PrefixGroups]:
        """The groups of each shard."""
        return [
            self.groups.take(np.arange(begin, end))
            for begin, end in pairwise(self.group_bounds.tolist())
        ]


def arrange(
    spec: JobSpec,
    requests: Requests,
    ranked: RankedPrompts,
    learned: Learned | None,
    target: Target | None,
    max_model_len: int,
    classes: PromptClasses | None = None,
) -> Arrangement:
    """Choose the groups, cut the requests into shards (ADR 32), and sort the groups of each.

    The members of a group in two shards are two groups. The order is that of Eq. 4, with subtrees
    kept together (ADR 8).

    Args:
        ranked: the requests' prompts in order.
        learned: output lengths from an earlier partition.
        target: shards are balanced by this GPU's time; None to balance by tokens.
        max_model_len: upper bound of a prompt with its output.
        classes: of the prompts, if there are several: each shard has one after the other.
    """
    with Progress("choose and order groups", len(_STEPS), unit="steps", announce=False) as progress:
        tree = ranked.tree(requests.lengths)
        progress.advance(1, _STEPS[0])
        choice = choose_prefixes(tree)
        progress.advance(1, _STEPS[1])
        learns = spec.planner.learns_output_tokens
        none = np.zeros((0, 2), dtype=np.int64)
        prefix_hashes = hash_prefixes(requests, choice.groups) if learns else none
        estimated = estimate_output_tokens(spec, requests, learned, choice.groups, prefix_hashes)
        room = np.maximum(max_model_len - requests.lengths, 1)  # a pooled prompt may leave none
        output_tokens = np.minimum(estimated, room)
        progress.advance(1, _STEPS[2])
        decode_tokens = output_tokens if spec.decodes else np.zeros_like(output_tokens)
        cut = Cut.of(spec, requests, ranked, decode_tokens, target)
        groups, shards, origins = _split(choice.groups, tree, cut, output_tokens)
        if classes is not None:
            by_class = np.lexsort((classes.of_groups(groups, requests), shards))
            groups, shards, origins = groups.take(by_class), shards[by_class], origins[by_class]
        group_bounds = np.searchsorted(shards, np.arange(len(cut.bounds)))
        progress.advance(1, _STEPS[3])
    return Arrangement(
        groups,
        group_bounds,
        cut,
        output_tokens,
        decode_tokens,
        prefix_hashes[origins] if learns else none,
        choice.algorithm_1_saved_tokens,
        choice.exact_saved_tokens,
    )


def _split(
    chosen: PrefixGroups, tree: PrefixTree, cut: Cut, output_tokens: npt.NDArray[np.int64]
) -> tuple[PrefixGroups, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The groups of the shards in order, each one's shard, and the chosen group that it is from."""
    parts, shards = split_groups(chosen, cut.shard_of_request)
    order = order_groups_by_subtree(parts, tree, output_tokens)
    order = order[np.argsort(shards[order], kind="stable")]
    origins = np.searchsorted(chosen.offsets, parts.offsets[order], side="right") - 1
    return parts.take(order), shards[order], origins
