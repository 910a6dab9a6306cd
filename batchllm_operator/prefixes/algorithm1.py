"""Reduces a tree's prefixes to one level: the paper's Algorithm 1, and its savings.

Single-level groups keep the scheduler and the attention kernel simple; Algorithm 1 picks
the level for each part of the tree, so that little of the multi-level reuse is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import Int64s, compiled
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree

_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroups:
    """Prompts by shared prefix: all members of a group begin with the same tokens.

    Group `g` has the prompts `member_idxs[offsets[g]:offsets[g + 1]]`; each begins with
    the group's `num_prefix_tokens[g]` tokens and continues with its distinct part, which
    may be empty. A group of one shares nothing: its prefix has 0 tokens.

    Attributes:
        member_idxs: [num_prompts] int64, prompt indexes, group after group.
        offsets: [num_groups + 1] int64, from 0 to num_prompts, rising: no group is empty.
        num_prefix_tokens: [num_groups] int64; at least 1 in a group of two or more.
    """

    member_idxs: Int64s
    offsets: Int64s
    num_prefix_tokens: Int64s

    def __post_init__(self) -> None:
        assert np.all(self.sizes > 0) and np.all(self.num_prefix_tokens >= 0)
        assert np.array_equal(self.num_prefix_tokens > 0, self.sizes > 1)

    @classmethod
    def below(cls, tree: PrefixTree, nodes: Int64s) -> PrefixGroups:
        """Groups in lexicographic order of their first members.

        Args:
            nodes: [num_prompts] int64, by rank: the node whose path is the group's prefix, the
                leaf itself for a group of one.
        """
        tops, firsts, group_of_rank = np.unique(nodes, return_index=True, return_inverse=True)
        by_first = np.argsort(firsts)
        number = np.empty_like(by_first)
        number[by_first] = np.arange(len(by_first))
        ranks = np.argsort(number[group_of_rank], kind="stable")
        sizes = np.bincount(group_of_rank, minlength=len(tops))[by_first]
        prefix = np.where(sizes > 1, tree.depth[tops[by_first]], 0)
        return cls(tree.prompt_idxs[ranks], np.append(0, np.cumsum(sizes)), prefix)

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.num_prefix_tokens)

    @property
    def num_prompts(self) -> int:
        return len(self.member_idxs)

    @property
    def sizes(self) -> Int64s:
        """Members of each group, its share degree: [num_groups]."""
        return np.diff(self.offsets)

    def members(self, group_idx: int) -> Int64s:
        """Prompt indexes of one group, as a view."""
        return self.member_idxs[self.offsets[group_idx] : self.offsets[group_idx + 1]]

    def take(self, group_idxs: NDArray[np.integer[Any]] | Sequence[int]) -> PrefixGroups:
        """The groups at `group_idxs`, in that order: to reorder them, or to cut a shard."""
        wanted = np.asarray(group_idxs, dtype=np.int64)
        offsets = np.append(0, np.cumsum(self.sizes[wanted]))
        shift = np.repeat(self.offsets[wanted] - offsets[:-1], np.diff(offsets))
        members = self.member_idxs[np.arange(offsets[-1]) + shift]
        return PrefixGroups(members, offsets, self.num_prefix_tokens[wanted])


def maximize_reuse(tree: PrefixTree) -> PrefixGroups:
    """Algorithm 1 (paper, Sec. 4.2): enlarges the first-level prefixes of the whole tree.

    Bottom-up, a node's first-level prefix is forked off to the node's parent, with the
    node's own tokens in front, if the prefix saves more tokens than computing the node's
    tokens once more costs. A node left with a single prefix merges with it, as in any
    compact tree; a node left with none is gone. The prefixes that arrive at the root are
    the groups, and prompts that arrive alone are groups of one.

    There is no recursion; the time is at most linear in the number of tokens.

    Returns:
        Groups in lexicographic order of their first members, which doesn't depend on the
        order of the prompts; members of a group are in lexicographic order too.
    """
    return PrefixGroups.below(
        tree, _fork_prefixes(tree.parent, tree.depth, tree.num_leaves)[tree.leaves]
    )


def group_prefill_tokens(groups: PrefixGroups, lengths: Int64s) -> Int64s:
    """Tokens to prefill per group: its prefix once, and every distinct part.

    Args:
        groups: groups over prompts [0, num_prompts).
        lengths: [num_prompts] int64, tokens per prompt.

    Returns:
        [num_groups] int64, the denominator of Eq. 4. Their sum is the numerator in Eq. 2.
    """
    if len(groups) == 0:
        return np.zeros(0, dtype=np.int64)
    totals: Int64s = np.add.reduceat(lengths[groups.member_idxs], groups.offsets[:-1])
    return totals - (groups.sizes - 1) * groups.num_prefix_tokens


def saving_ratio(num_processed_tokens: int, num_logical_tokens: int) -> float:
    """Eq. 2 as a fraction: 1 - processed / logical prefill tokens, 0 for no tokens.

    It is below 0 if more tokens were processed than requested, as when an engine recomputes.
    """
    if num_logical_tokens == 0:
        return 0.0
    return 1.0 - num_processed_tokens / num_logical_tokens


@compiled
def _fork_prefixes(parent: Int64s, depth: Int64s, num_leaves: Int64s) -> Int64s:
    """The first-level prefix that contains each leaf, or the leaf itself, by node.

    A node that is forked off or merged keeps its end and only changes its container, so
    its tokens are always `depth[node] - depth[container[node]]`. A container precedes
    its contents in preorder. Each node is in one container's linked list at a time.
    """
    leaves = num_leaves.copy()
    container = np.full(len(parent), _NONE, dtype=np.int64)
    first = np.full(len(parent), _NONE, dtype=np.int64)
    following = np.full(len(parent), _NONE, dtype=np.int64)
    for node in range(len(parent) - 1, ROOT, -1):  # reverse preorder: children first
        above = parent[node]
        num_node_tokens = depth[node] - depth[above]
        item = first[node]
        kept, num_kept = _NONE, 0
        while item != _NONE:
            next_item = following[item]
            gain = (leaves[item] - 1) * (depth[item] - depth[node])
            if gain > num_node_tokens:
                leaves[node] -= leaves[item]
                container[item], following[item], first[above] = above, first[above], item
            else:
                container[item] = node
                kept, num_kept = item, num_kept + 1
            item = next_item
        if num_kept == 1:
            container[kept], following[kept], first[above] = above, first[above], kept
        elif num_kept > 1 or first[node] == _NONE:  # still an inner node, or a leaf
            container[node], following[node], first[above] = above, first[above], node
    outermost = np.arange(len(parent))
    for node in range(1, len(parent)):
        if container[node] > ROOT:
            outermost[node] = outermost[container[node]]
    return outermost
