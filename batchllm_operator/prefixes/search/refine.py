"""Refines prefixes in whole segments to prefixes in tokens.

Where prompts diverge in a tree over segments, they share less than one more segment. So the tokens
of that segment, of one prompt below each child, are enough: sorting the children of each node by
them gives the order and the LCPs of the token-exact tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.prompt_store import Prompts, chunks
from batchllm_operator.prefixes.search.lcp_tree import RankedPrompts
from batchllm_operator.prefixes.search.prefix_tree import ROOT, PrefixTree
from batchllm_operator.prefixes.search.row_sort import sort_rows
from batchllm_operator.prefixes.token_table import TokenTable

_LARGE_RANKS = 4096
_FLUSH_TOKENS = 1 << 20
_FIRST_TOKENS = 16  # of a window below a large node: 64 bytes, so that millions fit into memory


@dataclass(frozen=True, slots=True, eq=False)
class _Windows:
    """Windows of some nodes, each with its node's parent: one sort serves many parents.

    Attributes:
        nodes: [n] int64.
        rows: n rows of [number of the node's family, such as its parent, and its window].
    """

    nodes: NDArray[np.int64]
    rows: TokenTable


class Refinement:
    """Sorts the children of each node of a tree over segments by their first tokens.

    A node's window is the segment after its parent's end, as far as its prompt goes. Windows are
    read in preorder. Those below a node of few prompts are sorted and dropped soon after the last
    of them. Of the others only the first tokens are kept; if those are equal, the next ones are
    read again.

    Args:
        tree: a tree over segments, depths in tokens.
        segment_tokens: tokens per segment.
    """

    def __init__(self, tree: PrefixTree, prompts: Prompts, segment_tokens: int) -> None:
        self._tree = tree
        self._prompts = prompts
        self._lengths = prompts.lengths
        self._segment_tokens = segment_tokens
        self._begins = np.zeros(tree.num_nodes + 1, dtype=np.int64)  # offsets of nodes' children
        np.cumsum(
            np.bincount(tree.parent[ROOT + 1 :], minlength=tree.num_nodes), out=self._begins[1:]
        )
        self._children = np.empty(tree.num_nodes - 1, dtype=np.int64)
        self._shared = np.empty(tree.num_nodes - 1, dtype=np.int64)
        self._num_read = 0
        self._large: list[_Windows] = []
        self._open: list[_Windows] = []

    def read(self, prompts: TokenTable, first_rank: int) -> None:
        """Read the windows of the nodes that begin at the given ranks.

        Call it for all ranks, in order.

        Args:
            prompts: the prompts at consecutive ranks, each to one segment after its LCPs with
                its neighbours, or to its end.
            first_rank: the rank of the first of them; nodes read before are skipped.
        """
        tree, end_rank = self._tree, first_rank + len(prompts)
        first = ROOT + 1 + self._num_read
        last = first + int(np.searchsorted(tree.leaf_begin[first:], end_rank))
        self._num_read += last - first
        nodes = np.arange(first, last)
        parents = tree.parent[nodes]
        is_large = tree.leaf_end[parents] - tree.leaf_begin[parents] > _LARGE_RANKS
        for windows, chosen, most in (
            (self._large, is_large, min(_FIRST_TOKENS, self._segment_tokens)),
            (self._open, ~is_large, self._segment_tokens),
        ):
            places = tree.leaf_begin[nodes[chosen]] - first_rank
            rows = self._cut(nodes[chosen], parents[chosen], prompts, places, slice(0, most))
            windows.append(_Windows(nodes[chosen], rows))
        if sum(windows.rows.num_tokens for windows in self._open) > _FLUSH_TOKENS:
            self._flush(end_rank)

    def finish(self) -> RankedPrompts:
        """The prompts in lexicographic order, with exact LCPs."""
        tree = self._tree
        self._flush(tree.num_prompts)
        self._sort_large()
        ranks, num_shared = _walk(
            self._children, self._begins, self._shared, tree.leaf_begin, tree.num_prompts
        )
        return RankedPrompts.from_exact(tree.prompt_idxs[ranks], num_shared, self._lengths)

    def _cut(
        self,
        nodes: NDArray[np.int64],
        families: NDArray[np.int64],
        prompts: TokenTable,
        places: NDArray[np.int64],
        part: slice,
    ) -> TokenTable:
        """A row for each node: its family, and a part of its window.

        Args:
            prompts: has the prompt of `nodes[i]` at `places[i]`.
        """
        begins = self._tree.depth[self._tree.parent[nodes]] + part.start
        most = min(part.stop, self._segment_tokens) - part.start
        ends = self._lengths[self._tree.prompt_idxs[self._tree.leaf_begin[nodes]]]
        offsets = np.zeros(len(nodes) + 1, dtype=np.int64)
        np.cumsum(np.clip(ends - begins, 0, most) + 1, out=offsets[1:])
        rows = np.empty(offsets[-1], dtype=np.int32)
        rows[offsets[:-1]] = families
        _copy_windows(prompts.token_ids, prompts.offsets[places] + begins, offsets, rows)
        return TokenTable.unchecked(rows, offsets)

    def _flush(self, end_rank: int) -> None:
        """Sorts the children of nodes that end at `end_rank` or before."""
        if not self._open:
            return
        windows, self._open = _joined(self._open), []
        is_complete = self._tree.leaf_end[self._tree.parent[windows.nodes]] <= end_rank
        rest = np.flatnonzero(~is_complete)
        if len(rest):
            self._open.append(_Windows(windows.nodes[rest], windows.rows.take(rest)))
        order = sort_rows(windows.rows.take(np.flatnonzero(is_complete)))
        self._place(windows.nodes[is_complete][order.row_idxs], order.num_shared - 1)

    def _sort_large(self) -> None:
        """Sorts the children of large nodes, by more and more tokens while they are equal."""
        if not self._large:
            return
        windows, self._large = _joined(self._large), []
        order = sort_rows(windows.rows)
        nodes, num_shared = windows.nodes[order.row_idxs], order.num_shared - 1
        del windows, order
        end = min(_FIRST_TOKENS, self._segment_tokens)
        is_tied = num_shared == end  # with the one before
        while np.any(is_tied):
            tied = np.flatnonzero(is_tied | np.append(is_tied[1:], False))
            families = np.cumsum(~is_tied[tied])
            begin, end = end, end + _FIRST_TOKENS * (len(nodes) // len(tied))
            order = sort_rows(self._read_windows(nodes[tied], families, slice(begin, end)))
            nodes[tied] = nodes[tied][order.row_idxs]
            goes_on = is_tied[tied]
            num_shared[tied[goes_on]] = begin + order.num_shared[goes_on] - 1
            is_tied[tied] = goes_on & (num_shared[tied] == end)
        self._place(nodes, num_shared)

    def _read_windows(
        self, nodes: NDArray[np.int64], families: NDArray[np.int64], part: slice
    ) -> TokenTable:
        """As `_cut`, but reads the prompts, some at a time."""
        idxs = self._tree.prompt_idxs[self._tree.leaf_begin[nodes]]
        wanted = self._tree.depth[self._tree.parent[nodes]] + part.stop
        pieces = []
        for some in chunks(wanted):
            prompts = self._prompts.prefixes(idxs[some], wanted[some])
            places = np.arange(len(prompts))
            rows = self._cut(nodes[some], families[some], prompts, places, part)
            pieces.append(_Windows(nodes[some], rows))
        return _joined(pieces).rows

    def _place(self, nodes: NDArray[np.int64], num_shared: NDArray[np.int64]) -> None:
        """Stores the order of some parents' children, and the LCP of each with the one before.

        Args:
            nodes: all children of some parents, parents ascending, children in order.
            num_shared: LCP of each one's window with the one before.
        """
        parents = self._tree.parent[nodes]
        starts = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
        starts = starts[: len(nodes)]  # empty without nodes
        numbers = np.arange(len(nodes)) - np.repeat(starts, np.diff(np.append(starts, len(nodes))))
        places = self._begins[parents] + numbers
        self._children[places] = nodes
        self._shared[places] = self._tree.depth[parents] + num_shared


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
    """Leaves depth first: their ranks, and the LCP of each with the leaf before.

    Args:
        children: the children of node 0, sorted, of node 1, ...
        begins: [num_nodes + 1] offsets of each node's children.
        shared: LCP of each child with the one before it in its node.
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
