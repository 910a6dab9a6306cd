"""From prefixes in whole segments to prefixes in tokens.

Where prompts part in a tree over segments, they share less than one segment more. So the tokens
of that one segment, of one prompt below each child, say all that is missing: sorting the children
of each node by them gives the order and the common prefixes of the token-exact tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.planner.jit import compiled
from batchllm_operator.planner.prefixes.lcp_tree import RankedPrompts
from batchllm_operator.planner.prefixes.prefix_tree import ROOT, PrefixTree
from batchllm_operator.planner.prefixes.row_sort import sort_rows
from batchllm_operator.planner.prefixes.sorted_runs import RowSorter, ignore
from batchllm_operator.planner.token_table import TokenTable

_LARGE_RANKS = 4096
_FLUSH_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Windows:
    """Windows of some nodes, each behind its node's parent: one sort does for many parents.

    Attributes:
        nodes: [n] int64, ascending.
        rows: n rows of [the node's parent, its window].
    """

    nodes: NDArray[np.int64]
    rows: TokenTable


class Refinement:
    """Sorts the children of each node of a tree over segments by the tokens they begin with.

    A node's window is the segment behind its parent's end, or what its prompt has of it.
    Windows come in preorder. Those below a node of few prompts are sorted soon after the last
    of them came, and forgotten; the others go through a sort that needn't be in memory.

    Args:
        tree: a tree over segments, depths in tokens.
        lengths: [num_prompts] int64, tokens by prompt index.
        segment_tokens: tokens per segment.
        sorter: empty, for the windows below nodes of many prompts.
    """

    def __init__(
        self,
        tree: PrefixTree,
        lengths: NDArray[np.int64],
        segment_tokens: int,
        sorter: RowSorter,
    ) -> None:
        self._tree = tree
        self._lengths = lengths
        self._segment_tokens = segment_tokens
        self._sorter = sorter
        self._begins = np.zeros(tree.num_nodes + 1, dtype=np.int64)  # of each node's children
        np.cumsum(
            np.bincount(tree.parent[ROOT + 1 :], minlength=tree.num_nodes), out=self._begins[1:]
        )
        self._children = np.empty(tree.num_nodes - 1, dtype=np.int64)
        self._shared = np.empty(tree.num_nodes - 1, dtype=np.int64)
        self._num_read = 0
        self._sorted_nodes: list[NDArray[np.int64]] = []  # whose windows went to the sorter
        self._open: list[_Windows] = []

    def read(self, prompts: TokenTable, first_rank: int) -> None:
        """Take the windows of the nodes that begin at some ranks out of their prompts.

        To be called for all ranks, in order.

        Args:
            prompts: the prompts at consecutive ranks, each to one segment behind what it
                shares with its neighbours, or to its end.
            first_rank: the rank of the first of them; nodes read before are left alone.
        """
        tree, end_rank = self._tree, first_rank + len(prompts)
        first = ROOT + 1 + self._num_read
        last = first + int(np.searchsorted(tree.leaf_begin[first:], end_rank))
        self._num_read += last - first
        nodes = np.arange(first, last)
        is_large = self._has_large_parent(nodes)
        self._sorter.add(self._cut_windows(nodes[is_large], prompts, first_rank).rows)
        self._sorted_nodes.append(nodes[is_large])
        self._open.append(self._cut_windows(nodes[~is_large], prompts, first_rank))
        if sum(windows.rows.num_tokens for windows in self._open) > _FLUSH_TOKENS:
            self._flush(end_rank)

    def finish(self) -> RankedPrompts:
        """The prompts in lexicographic order, and what neighbours share, in tokens."""
        tree = self._tree
        self._flush(tree.num_prompts)
        order = self._sorter.sort(ignore)
        nodes = np.concatenate(self._sorted_nodes) if self._sorted_nodes else order.row_idxs
        self._place(nodes[order.row_idxs], order.num_shared)
        ranks, num_shared = _walk(
            self._children, self._begins, self._shared, tree.leaf_begin, tree.num_prompts
        )
        return RankedPrompts.from_exact(tree.prompt_idxs[ranks], num_shared, self._lengths)

    def _has_large_parent(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        parents = self._tree.parent[nodes]
        is_large: NDArray[np.bool_] = (
            self._tree.leaf_end[parents] - self._tree.leaf_begin[parents] > _LARGE_RANKS
        )
        return is_large

    def _cut_windows(
        self, nodes: NDArray[np.int64], prompts: TokenTable, first_rank: int
    ) -> _Windows:
        tree = self._tree
        begins = tree.depth[tree.parent[nodes]]
        ranks = tree.leaf_begin[nodes]
        sizes = np.minimum(self._lengths[tree.prompt_idxs[ranks]] - begins, self._segment_tokens)
        offsets = np.zeros(len(nodes) + 1, dtype=np.int64)
        np.cumsum(sizes + 1, out=offsets[1:])
        rows = np.empty(offsets[-1], dtype=np.int32)
        rows[offsets[:-1]] = tree.parent[nodes]
        sources = prompts.offsets[ranks - first_rank] + begins
        _copy_windows(prompts.token_ids, sources, offsets, rows)
        return _Windows(nodes, TokenTable.unchecked(rows, offsets))

    def _flush(self, end_rank: int) -> None:
        """Sorts below the nodes that end at `end_rank` or before."""
        if not self._open:
            return
        windows, self._open = _joined(self._open), []
        is_complete = self._tree.leaf_end[self._tree.parent[windows.nodes]] <= end_rank
        rest = np.flatnonzero(~is_complete)
        if len(rest):
            self._open.append(_Windows(windows.nodes[rest], windows.rows.take(rest)))
        order = sort_rows(windows.rows.take(np.flatnonzero(is_complete)))
        nodes = windows.nodes[is_complete][order.row_idxs]
        self._place(nodes, order.num_shared)

    def _place(self, nodes: NDArray[np.int64], num_shared: NDArray[np.int64]) -> None:
        """Notes the order of some parents' children, and what each shares with the one before.

        Args:
            nodes: all children of some parents, parents ascending, children in order.
            num_shared: what each one's row, its parent and its window, shares with the one before.
        """
        parents = self._tree.parent[nodes]
        starts = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
        starts = starts[: len(nodes)]  # none if there are no nodes
        numbers = np.arange(len(nodes)) - np.repeat(starts, np.diff(np.append(starts, len(nodes))))
        places = self._begins[parents] + numbers
        self._children[places] = nodes
        self._shared[places] = self._tree.depth[parents] + num_shared - 1


def _joined(windows: list[_Windows]) -> _Windows:
    lengths = [each.rows.lengths for each in windows]
    offsets = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths]))
    rows = np.concatenate([each.rows.token_ids for each in windows])
    nodes = np.concatenate([each.nodes for each in windows])
    return _Windows(nodes, TokenTable.unchecked(rows, offsets))


@compiled
def _copy_windows(
    token_ids: NDArray[np.int32],
    sources: NDArray[np.int64],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> None:
    for item in range(len(sources)):
        begin, end = offsets[item] + 1, offsets[item + 1]
        rows[begin:end] = token_ids[sources[item] : sources[item] + end - begin]


@compiled
def _walk(
    children: NDArray[np.int64],
    begins: NDArray[np.int64],
    shared: NDArray[np.int64],
    leaf_begin: NDArray[np.int64],
    num_prompts: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Leaves depth first: their ranks, and what each shares with the leaf before.

    Args:
        children: the children of node 0, sorted, of node 1, ...
        begins: [num_nodes + 1] where the children of each node begin.
        shared: what each child shares with the one before it in its node.
    """
    ranks = np.empty(num_prompts, dtype=np.int64)
    num_shared = np.zeros(num_prompts, dtype=np.int64)
    cursor = begins.copy()
    path = np.empty(len(begins), dtype=np.int64)
    path[0], num_open = ROOT, 1
    num_listed, from_before = 0, 0
    while num_open > 0:
        node = path[num_open - 1]
        if begins[node] == begins[node + 1] and node != ROOT:
            ranks[num_listed], num_shared[num_listed] = leaf_begin[node], from_before
            num_listed += 1
        if cursor[node] == begins[node + 1]:
            num_open -= 1
            continue
        if cursor[node] > begins[node]:
            from_before = shared[cursor[node]]
        path[num_open] = children[cursor[node]]
        cursor[node] += 1
        num_open += 1
    return ranks, num_shared
