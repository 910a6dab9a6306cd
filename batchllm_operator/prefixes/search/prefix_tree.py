"""Compact prefix tree over all prompts of a job (paper, Sec. 4.2 and Fig. 4a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    prompt_idxs: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    leaf_begin: NDArray[np.int64]
    leaf_end: NDArray[np.int64]

    @property
    def num_nodes(self) -> int:
        """Nodes, the root and the leaves included: at most 2 * num_prompts + 1."""
        return len(self.parent)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_idxs)

    @property
    def num_leaves(self) -> NDArray[np.int64]:
        """Prompts below each node: [num_nodes]."""
        return self.leaf_end - self.leaf_begin

    @property
    def leaves(self) -> NDArray[np.int64]:
        """The leaf node of each rank: [num_prompts]."""
        return np.flatnonzero(self.num_leaves[1:] == 1) + 1

    @property
    def num_node_tokens(self) -> NDArray[np.int64]:
        """Tokens of each node itself, without those of its ancestors: [num_nodes]."""
        tokens = self.depth.copy()
        tokens[1:] -= self.depth[self.parent[1:]]
        return tokens

    @property
    def num_distinct_prefix_tokens(self) -> int:
        """Tokens to process if every shared token is computed once, on all levels.

        It equals the number of different non-empty prefixes of the prompts, and no plan
        can process fewer: with it, `saving_ratio` gives the multi-level optimum.
        """
        return int(self.num_node_tokens.sum())
