"""Scheduling order of groups (paper, Sec. 4.3.2)."""

from collections.abc import Sequence

import numpy as np

from batchllm_operator.prefixes.algorithm1 import (
    PrefixGroups,
    group_prefill_tokens,
    maximize_reuse,
)
from batchllm_operator.prefixes.jit import Int64s, compiled
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree
from batchllm_operator.prefixes.prompt_sort import build_prefix_tree
from batchllm_operator.prefixes.token_table import TokenTable

MIN_SHARED_TOKENS = 64
"""Four blocks of 16 tokens: the least saving per group for which groups are kept adjacent."""
BY_RATIO = 1 << 62
"""In its place, the order of Eq. 4 without subtrees."""


def order_groups_by_subtree(
    groups: PrefixGroups,
    tree: PrefixTree,
    output_tokens: Int64s,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> Int64s:
    """Puts groups with much decoding per prefill first, as Eq. 3 and 4 do, subtree by subtree.

    R = (mean of the members' estimated output tokens) / (prefix + sum of distinct tokens); larger R
    goes first, so that the long prefills later in the job meet decodes of earlier requests to
    share a token batch with. Eq. 4 takes the output length as constant and writes 1 for it: with
    equal estimates this is the order of Eq. 4 exactly. A group without any token to prefill has R =
    infinity.

    Tokens that a group shares with other groups stay in the engine's block cache if those groups
    come soon. So a node of the tree is a *subtree*, whose groups stay together, if it is at least
    `min_shared_tokens` deeper than the subtree around it; the root is the outermost one. The direct
    contents of a subtree, groups and smaller subtrees, are ordered by R, a subtree's being that of
    its average group: (mean output tokens of its members) / (mean prefill tokens of its groups).
    Equal R are ordered by the lexicographic rank of the first prompt.

    Args:
        groups: groups chosen from `tree`.
        output_tokens: [num_prompts] int64 >= 0, estimated output tokens per prompt.
        min_shared_tokens: at least 1; above all lengths, the order is that of R alone.

    Returns:
        [num_groups] int64, group indexes in scheduling order, for `PrefixGroups.take`.
    """
    if len(groups) == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = np.empty(tree.num_prompts, dtype=np.int64)
    lengths[tree.prompt_idxs] = tree.depth[tree.leaves]
    ranks = np.empty(tree.num_prompts, dtype=np.int64)
    ranks[tree.prompt_idxs] = np.arange(tree.num_prompts)
    first_ranks = np.minimum.reduceat(ranks[groups.member_idxs], groups.offsets[:-1])
    outputs = np.add.reduceat(output_tokens[groups.member_idxs], groups.offsets[:-1])
    leaves, prefixes = tree.leaves[first_ranks], groups.num_prefix_tokens
    inside = _nest(tree.parent, tree.depth, tree.num_leaves, leaves, prefixes, min_shared_tokens)
    totals = np.zeros((4, len(inside)), dtype=np.int64)
    totals[:, : len(groups)] = np.stack(
        [outputs, group_prefill_tokens(groups, lengths), groups.sizes, np.ones_like(outputs)]
    )
    first_rank = np.full(len(inside), np.iinfo(np.int64).max)
    first_rank[: len(groups)] = first_ranks
    _add_up(inside, totals, first_rank)
    decode, prefill, num_members, num_groups = totals.astype(np.float64)
    ratio = np.full(len(inside), np.inf)
    # One division: R that are equal as fractions are equal, as long as products are below 2**53.
    np.divide(decode * num_groups, prefill * num_members, out=ratio, where=prefill > 0)
    listing = np.lexsort((first_rank, -ratio, -inside))[1:]  # without the root, which is last
    return np.argsort(_place(inside, listing, totals[3])[: len(groups)])


def prefix_sharing_groups(
    prompts: Sequence[Sequence[int]],
) -> list[tuple[list[int], list[list[int]]]]:
    """Groups of prompts in the form of Sec. 5, in scheduling order, for equal output lengths.

    Returns:
        Per group, (prefix token ids, [distinct token ids of each member]). A prompt that
        shares nothing is ([], [all of its token ids]).

    Raises `PlanError`, `OverflowError`: as `TokenTable.from_lists`.
    """
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    groups = maximize_reuse(tree)
    order = order_groups_by_subtree(groups, tree, np.ones_like(tokens.lengths), BY_RATIO)
    listed = []
    for group_idx in order.tolist():
        cut = int(groups.num_prefix_tokens[group_idx])
        members = [tokens.prompt(idx).tolist() for idx in groups.members(group_idx).tolist()]
        listed.append((members[0][:cut], [member[cut:] for member in members]))
    return listed


@compiled
def _nest(
    parent: Int64s,
    depth: Int64s,
    num_leaves: Int64s,
    group_leaves: Int64s,
    num_prefix_tokens: Int64s,
    min_shared_tokens: int,
) -> Int64s:
    """The subtree that directly holds each group and each subtree: [num_groups + num_subtrees].

    Subtrees are numbered behind the groups, those inside before those around them, so the root is
    the last; its entry is its number plus 1. A group of one lies in the innermost subtree around
    its leaf, others in the innermost subtree around their prefix.
    """
    subtree_of_node = np.zeros(len(parent), dtype=np.int64)
    above = np.full(len(parent), -1, dtype=np.int64)
    subtree_depth = np.zeros(len(parent), dtype=np.int64)
    num_subtrees = 1
    for node in range(ROOT + 1, len(parent)):
        around = subtree_of_node[parent[node]]
        subtree_of_node[node] = around
        if num_leaves[node] > 1 and depth[node] - subtree_depth[around] >= min_shared_tokens:
            subtree_of_node[node] = num_subtrees
            above[num_subtrees], subtree_depth[num_subtrees] = around, depth[node]
            num_subtrees += 1
    inside = np.empty(len(group_leaves) + num_subtrees, dtype=np.int64)
    root = len(inside) - 1
    for group_idx in range(len(group_leaves)):
        subtree, prefix = (
            subtree_of_node[parent[group_leaves[group_idx]]],
            num_prefix_tokens[group_idx],
        )
        while 0 < prefix < subtree_depth[subtree]:
            subtree = above[subtree]
        inside[group_idx] = root - subtree
    for subtree in range(num_subtrees):
        inside[root - subtree] = root - above[subtree]
    return inside


@compiled
def _add_up(inside: Int64s, totals: Int64s, first_rank: Int64s) -> None:
    """Adds each group and subtree to the subtree around it, in place."""
    for item in range(len(inside) - 1):
        totals[:, inside[item]] += totals[:, item]
        first_rank[inside[item]] = min(first_rank[inside[item]], first_rank[item])


@compiled
def _place(inside: Int64s, listing: Int64s, num_groups: Int64s) -> Int64s:
    """The place of each group, with the contents of subtrees listed as in `listing`, root first."""
    place = np.zeros(len(inside), dtype=np.int64)  # of a subtree: that of its next item
    for item in listing:
        place[item] = place[inside[item]]
        place[inside[item]] += num_groups[item]
    return place
