"""The compact prefix tree over all prompts of a job (paper, Sec. 4.2 and Fig. 4a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import Int64s, compiled

ROOT = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Radix tree in preorder: a parent precedes its children, children ascend by token.

    Node 0 is the root, a dummy without tokens. Each prompt is a leaf: one that ends where
    an inner node ends, and each of several equal prompts, is a leaf without tokens of its
    own. Each inner node but the root has at least two children and at least one token.

    A *rank* is a prompt's position in lexicographic order of token ids, a prompt before
    its extensions, equal prompts by index. Node v covers ranks
    [leaf_begin[v], leaf_end[v]), and v is a leaf if it isn't the root and covers one.

    Attributes:
        prompt_idxs: [num_prompts] int64, the prompt at each rank.
        parent: [num_nodes] int64, -1 for the root.
        depth: [num_nodes] int64, tokens from the root to the node's end.
        leaf_begin: [num_nodes] int64.
        leaf_end: [num_nodes] int64.
    """

    prompt_idxs: Int64s
    parent: Int64s
    depth: Int64s
    leaf_begin: Int64s
    leaf_end: Int64s

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_idxs)

    @property
    def num_leaves(self) -> Int64s:
        """Prompts below each node: [num_nodes]."""
        return self.leaf_end - self.leaf_begin

    @property
    def leaves(self) -> Int64s:
        """The leaf node of each rank: [num_prompts]."""
        return np.flatnonzero(self.num_leaves[1:] == 1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class RankedPrompts:
    """Prompts in lexicographic order, so that those with a common prefix are neighbours.

    Attributes:
        prompt_idxs: [num_prompts] int64, the prompt at each rank; equal ones ascend.
        num_shared_tokens: [num_prompts] int64, the longest common prefix (LCP) of each with the
            one before; 0 for the first.
    """

    prompt_idxs: Int64s
    num_shared_tokens: Int64s

    def tree(self, lengths: Int64s) -> PrefixTree:
        """The prefix tree, which doesn't depend on the order of the prompts' indexes.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
        """
        leaf_begin, leaf_end, depth = _preorder(self.num_shared_tokens, lengths[self.prompt_idxs])
        parent = _find_parents(leaf_begin, leaf_end)
        return PrefixTree(self.prompt_idxs, parent, depth, leaf_begin, leaf_end)

    def only(self, is_chosen: NDArray[np.bool_]) -> RankedPrompts:
        """Some of the prompts, in the same order, as if there were no others.

        Args:
            is_chosen: [num_prompts], by prompt index; at least one.
        """
        ranks = np.flatnonzero(is_chosen[self.prompt_idxs])
        until_last = self.num_shared_tokens[: ranks[-1] + 1]
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:  # prompts share what all between them share
            shared[1:] = np.minimum.reduceat(until_last, ranks[:-1] + 1)
        return RankedPrompts(self.prompt_idxs[ranks], shared)

    def apart(self) -> RankedPrompts:
        """The same order, as if no prompt had anything in common with others."""
        return RankedPrompts(self.prompt_idxs, np.zeros_like(self.num_shared_tokens))

    def cached_tokens(self, lengths: Int64s, block_size: int) -> Int64s:
        """Tokens of each prompt that an engine with enough memory finds in its KV cache.

        Those that it shares with the prompt before, in whole blocks, yet never its last token,
        which vLLM always computes. The engine has to compute the rest, in any order of the prompts.
        If another engine takes over at some rank, it finds nothing for the prompt there.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
            block_size: tokens per block.

        Returns:
            [num_prompts] int64, by rank.

        Raises `PlanError`: `block_size` is below 1.
        """
        if block_size < 1:
            raise PlanError(f"blocks hold at least 1 token, not {block_size}")
        shared = np.minimum(self.num_shared_tokens, lengths[self.prompt_idxs] - 1)
        cached: Int64s = np.maximum(shared, 0) // block_size * block_size
        return cached


@compiled
def _preorder(shared: Int64s, lengths: Int64s) -> Int64s:
    """First rank, end and depth of each node in preorder: [3, num_nodes].

    From the last rank to the first, nodes are met in the reverse of that order: a leaf, then the
    inner nodes that begin with it, the deepest first.
    """
    num_prompts = len(shared)
    node = 2 * num_prompts
    nodes = np.zeros((3, node + 1), dtype=np.int64)
    open_depth = np.empty(num_prompts, dtype=np.int64)
    open_end = np.empty(num_prompts, dtype=np.int64)
    num_open = 0
    for rank in range(num_prompts - 1, -1, -1):
        end = rank + 1
        nodes[0, node], nodes[1, node], nodes[2, node] = rank, end, lengths[rank]
        while num_open > 0 and open_depth[num_open - 1] > shared[rank]:
            num_open -= 1
            node, end = node - 1, open_end[num_open]
            nodes[0, node], nodes[1, node], nodes[2, node] = rank, end, open_depth[num_open]
        if shared[rank] > 0 and (num_open == 0 or open_depth[num_open - 1] < shared[rank]):
            open_depth[num_open], open_end[num_open] = shared[rank], end
            num_open += 1
        node -= 1
    nodes[1, node] = num_prompts  # the root
    return nodes[:, node:].copy()


@compiled
def _find_parents(leaf_begin: Int64s, leaf_end: Int64s) -> Int64s:
    """Parents of nodes in preorder: the last earlier node whose range isn't over."""
    parent = np.empty(len(leaf_end), dtype=np.int64)
    parent[ROOT] = -1
    path = np.empty(len(leaf_end), dtype=np.int64)
    path[0], num_open = ROOT, 1
    for node in range(1, len(leaf_end)):
        while leaf_end[path[num_open - 1]] <= leaf_begin[node]:
            num_open -= 1
        parent[node] = path[num_open - 1]
        path[num_open] = node
        num_open += 1
    return parent
