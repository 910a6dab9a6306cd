"""From requests to shards: chooses groups, cuts shards, and orders the groups of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from batchllm_operator.cost import BLOCK_SIZE, WorkArrays, prompt_work, rates
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.output_lengths import Learned, estimate_output_tokens
from batchllm_operator.prefixes import (
    PrefixGroups,
    PromptClasses,
    RankedPrompts,
    Requests,
    TreeNode,
    choose_prefixes,
    cut_into_shards,
    hash_prefixes,
    largest_nodes,
    order_groups_by_subtree,
    split_groups,
)
from batchllm_operator.prefixes.jit import Float64s, Int64s
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.counts import PromptCounts

_SHARD_S: Final = 120.0
"""Short, so that workers end at about the same time; long beside the second that a claim takes."""
_SHARD_TOKENS: Final = 1e6
"""A 7B model on an A100 takes about two minutes for them, by the roofline."""
_MOST_SHARDS: Final = 1000
"""Unless the spec asks for more: each is a file, which each worker looks up."""


def usual_num_shards(cost: float, target: Target | None) -> int:
    """Shards of a plan whose spec doesn't say how many: each of two minutes, or a million tokens.

    The workers don't count: their number may differ from run to run of one plan.

    Args:
        cost: of all requests, by `work_costs`.
    """
    per_shard = _SHARD_TOKENS
    if target is not None:
        per_shard = _SHARD_S * 1e9 * target.balance_limits.num_gpus
    return min(max(math.ceil(cost / per_shard), 1), _MOST_SHARDS)


def work_costs(
    target: Target | None, lengths: Int64s, output_tokens: Int64s, cached_tokens: Int64s
) -> tuple[Float64s, Float64s]:
    """Costs of sorted requests, and of what each finds in the cache, for `cut_into_shards`.

    In nanoseconds of the target; without a target in tokens, prefilled and decoded.

    Args:
        lengths, output_tokens, cached_tokens: int64 [num_requests], by rank, as both results:
            float64, whole numbers.
    """
    work = prompt_work(lengths, output_tokens, cached_tokens)
    if target is None:
        tokens = work.num_prefill_tokens + work.num_decode_tokens
        return tokens.astype(np.float64), cached_tokens.astype(np.float64)
    rate = rates(work.total(), target.model, target.gpu, target.balance_limits)
    costs = work.nanoseconds(rate)
    del work  # a plan may have millions of requests
    alone = prompt_work(lengths, output_tokens).nanoseconds(rate)
    cut_costs = alone - costs
    # Held for a long output, a prefix could cost more than all of a prompt with a short one.
    cut_costs[1:] = np.minimum(cut_costs[1:], alone[:-1])
    return costs, cut_costs


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Requests in lexicographic order, cut into shards of about equal work.

    Attributes:
        bounds: int64 [num_shards + 1], ranks, from 0 to num_requests; no shard is empty.
        shard_of_request: int64 [num_requests], by request.
        costs: float64 [num_shards], by which shards are balanced.
        work: by rank, with what a shard's engine finds in its cache left out.
        num_optimal_tokens: prefill tokens if there were one shard only.
    """

    bounds: Int64s
    shard_of_request: Int64s
    costs: Float64s
    work: WorkArrays
    num_optimal_tokens: int

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        requests: Requests,
        ranked: RankedPrompts,
        decode_tokens: Int64s,
        target: Target | None,
    ) -> Cut:
        """Cut where neighbours share little; the arguments are those of `arrange`."""
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
        shards = np.empty_like(idxs)
        shards[idxs] = np.repeat(np.arange(len(firsts)), np.diff(bounds))
        work = prompt_work(lengths, outputs, cached)
        return cls(bounds, shards, np.add.reduceat(costs, firsts), work, num_optimal)


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The groups in the order of the plan, shard after shard.

    Attributes:
        shards: the groups of each shard.
        group_bounds: int64 [num_shards + 1]: shard s has the groups
            [group_bounds[s], group_bounds[s + 1]).
        output_tokens: int64 [num_requests], estimates.
        decode_tokens: int64 [num_requests], those that take decode steps; 0 in a job without.
        prefix_hashes: int64 [num_groups, 2], see `hash_prefixes`; None if nothing is to be learned.
        counts: fields of `PlanCounts`, but those that reading rows tells.
        tree: the largest nodes of the prefix tree.
        prompts: of a job of several prompts.
    """

    groups: PrefixGroups
    shards: list[PrefixGroups]
    group_bounds: Int64s
    cut: Cut
    output_tokens: Int64s
    decode_tokens: Int64s
    prefix_hashes: Int64s | None
    counts: dict[str, int]
    tree: tuple[TreeNode, ...]
    prompts: tuple[PromptCounts, ...]


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
    kept together (ADR 8), and one class of prompts after the other.

    Args:
        ranked: the requests' prompts in order.
        target: shards are balanced by this GPU's time; None to balance by tokens.
    """
    tree = ranked.tree(requests.lengths)
    largest, choice = largest_nodes(tree), choose_prefixes(tree)
    hashes = None
    if spec.planner.learns_output_tokens:
        hashes = hash_prefixes(requests, choice.groups)
    questions = spec.questions
    asked = requests.questions(len(questions))
    estimated = estimate_output_tokens(spec, requests, asked, learned, choice.groups, hashes)
    room = np.maximum(max_model_len - requests.lengths, 1)  # a pooled prompt may leave none
    output_tokens = np.minimum(estimated, room)
    decodes = np.array([question.decodes for question in questions])
    decode_tokens = np.where(decodes[asked], output_tokens, 0)
    cut = Cut.of(spec, requests, ranked, decode_tokens, target)
    groups, shards = split_groups(choice.groups, cut.shard_of_request)
    order = order_groups_by_subtree(groups, tree, output_tokens)
    keys = [shards[order]]
    if classes is not None:
        keys.insert(0, classes.of_groups(groups.take(order), requests))
    order = order[np.lexsort(keys)]
    group_bounds = np.searchsorted(shards[order], np.arange(len(cut.bounds)))
    if hashes is not None:
        origins = np.searchsorted(choice.groups.offsets, groups.offsets[order], side="right") - 1
        hashes = hashes[origins]
    groups = groups.take(order)
    bounds = pairwise(group_bounds.tolist())
    by_shard = [groups.take(np.arange(begin, end)) for begin, end in bounds]
    counts = {
        "num_duplicate_rows": int(requests.num_rows.sum()) - len(requests),
        "num_requests": len(requests),
        "num_groups": len(groups),
        "num_shared_groups": int(np.count_nonzero(groups.sizes > 1)),
        "num_logical_tokens": int((requests.lengths * requests.num_rows).sum()),
        "num_planned_tokens": int(cut.work.num_prefill_tokens.sum()),
        "num_optimal_tokens": cut.num_optimal_tokens,
        "num_algorithm_1_saved_tokens": choice.algorithm_1_saved_tokens,
        "num_exact_saved_tokens": choice.exact_saved_tokens,
    }
    numbers = (output_tokens, decode_tokens, hashes, counts, largest)
    prompts = tuple(_prompt_counts(spec, requests, ranked, asked)) if spec.prompts else ()
    return Arrangement(groups, by_shard, group_bounds, cut, *numbers, prompts)


def _prompt_counts(
    spec: JobSpec, requests: Requests, ranked: RankedPrompts, asked: Int64s
) -> Iterator[PromptCounts]:
    """The counts of each prompt; `asked` is the question of each request."""
    for number in range(len(spec.prompts)):
        is_own = asked == number
        lengths, num_alone = requests.lengths[is_own], 0
        if len(lengths):
            cached = ranked.only(is_own).cached_tokens(requests.lengths, block_size_of(spec))
            num_alone = int(lengths.sum() - cached.sum())
        num_rows = requests.num_rows[is_own]
        yield PromptCounts(
            num_requests=len(lengths),
            num_logical_tokens=int((lengths * num_rows).sum()),
            num_alone_tokens=num_alone,
        )
