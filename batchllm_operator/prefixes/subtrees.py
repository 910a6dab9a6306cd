"""Assigns groups to subtrees, for orders that keep subtrees together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.prefix_tree import ROOT, PrefixTree

_ALL = 0  # the subtree of the root


@dataclass(frozen=True, slots=True, eq=False)
class Subtrees:
    """Nested sets of groups. Subtree 0 holds all; a subtree precedes those inside it.

    Attributes:
        above: [num_subtrees] int64, the subtree around each one, -1 for the first.
        enclosing: [num_groups] int64, the innermost subtree of each group.
    """

    above: NDArray[np.int64]
    enclosing: NDArray[np.int64]

    def totals(
        self, values: NDArray[np.int64], ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sums and the least rank over all groups of each subtree.

        Args:
            values: [n, num_groups] int64.
            ranks: [num_groups] int64.

        Returns:
            [n, num_subtrees] and [num_subtrees] int64.
        """
        sums = np.zeros((len(values), len(self.above)), dtype=np.int64)
        least = np.full(len(self.above), np.iinfo(np.int64).max)
        _add_up(self.above, self.enclosing, values, ranks, sums, least)
        return sums, least

    def walk(self, ranking: NDArray[np.int64]) -> NDArray[np.int64]:
        """Groups in an order that lists each subtree as a whole.

        Args:
            ranking: [num_groups + num_subtrees] int64, all groups g and all subtrees s as
                num_groups + s; the direct contents of a subtree are listed in this order.

        Returns:
            [num_groups] int64, group indexes.
        """
        inside = np.concatenate([self.enclosing, self.above])[ranking]
        items = ranking[np.argsort(inside, kind="stable")]
        begins = np.cumsum(np.bincount(inside + 1, minlength=len(self.above) + 1))
        return _walk(items, begins, len(self.enclosing))


def find_subtrees(
    tree: PrefixTree,
    group_leaves: NDArray[np.int64],
    num_prefix_tokens: NDArray[np.int64],
    min_shared_tokens: int,
) -> Subtrees:
    """Subtrees of inner nodes that are at least `min_shared_tokens` below the next one above.

    A group of one lies in the innermost subtree around its leaf, others in the innermost subtree
    around their prefix.

    Args:
        group_leaves: [num_groups] int64, the leaf of one member of each group.
        num_prefix_tokens: [num_groups] int64, 0 for groups of one.
        min_shared_tokens: at least 1.
    """
    is_inner = tree.num_leaves > 1
    subtree_of_node, above, depth = _number(tree.parent, tree.depth, is_inner, min_shared_tokens)
    enclosing = subtree_of_node[tree.parent[group_leaves]]
    _leave_deeper(enclosing, above, depth, num_prefix_tokens)
    return Subtrees(above, enclosing)


@compiled
def _number(
    parent: NDArray[np.int64],
    depth: NDArray[np.int64],
    is_inner: NDArray[np.bool_],
    min_shared_tokens: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The innermost subtree of each node; of each subtree, the one above and the depth."""
    subtree_of_node = np.zeros(len(parent), dtype=np.int64)
    above = np.full(len(parent), -1, dtype=np.int64)
    subtree_depth = np.zeros(len(parent), dtype=np.int64)
    num_subtrees = 1
    for node in range(ROOT + 1, len(parent)):
        around = subtree_of_node[parent[node]]
        subtree_of_node[node] = around
        if is_inner[node] and depth[node] - subtree_depth[around] >= min_shared_tokens:
            subtree_of_node[node] = num_subtrees
            above[num_subtrees], subtree_depth[num_subtrees] = around, depth[node]
            num_subtrees += 1
    return subtree_of_node, above[:num_subtrees].copy(), subtree_depth[:num_subtrees].copy()


@compiled
def _leave_deeper(
    enclosing: NDArray[np.int64],
    above: NDArray[np.int64],
    subtree_depth: NDArray[np.int64],
    num_prefix_tokens: NDArray[np.int64],
) -> None:
    """Moves groups out of subtrees that are deeper than their prefix, in place."""
    for group_idx in range(len(enclosing)):
        if num_prefix_tokens[group_idx] > 0:
            while subtree_depth[enclosing[group_idx]] > num_prefix_tokens[group_idx]:
                enclosing[group_idx] = above[enclosing[group_idx]]


@compiled
def _add_up(
    above: NDArray[np.int64],
    enclosing: NDArray[np.int64],
    values: NDArray[np.int64],
    ranks: NDArray[np.int64],
    sums: NDArray[np.int64],
    least: NDArray[np.int64],
) -> None:
    for group_idx in range(len(enclosing)):
        subtree = enclosing[group_idx]
        sums[:, subtree] += values[:, group_idx]
        least[subtree] = min(least[subtree], ranks[group_idx])
    for subtree in range(len(above) - 1, _ALL, -1):
        sums[:, above[subtree]] += sums[:, subtree]
        least[above[subtree]] = min(least[above[subtree]], least[subtree])


@compiled
def _walk(
    items: NDArray[np.int64], begins: NDArray[np.int64], num_groups: int
) -> NDArray[np.int64]:
    """Lists groups depth first; subtree s holds `items[begins[s]:begins[s + 1]]`."""
    listed = np.empty(num_groups, dtype=np.int64)
    num_listed = 0
    path = np.empty(len(begins), dtype=np.int64)  # open subtrees
    path[0], num_open = _ALL, 1
    cursor = begins.copy()
    while num_open > 0:
        subtree = path[num_open - 1]
        if cursor[subtree] == begins[subtree + 1]:
            num_open -= 1
            continue
        item = items[cursor[subtree]]
        cursor[subtree] += 1
        if item < num_groups:
            listed[num_listed] = item
            num_listed += 1
        else:
            path[num_open] = item - num_groups
            num_open += 1
    return listed
