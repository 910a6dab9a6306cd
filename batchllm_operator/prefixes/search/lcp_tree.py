"""Builds a prefix tree from sorted prompts and their LCPs: one pass with a stack.

It needs only the prompts' order and the longest common prefix (LCP) of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.search.prefix_tree import ROOT, PrefixTree
from batchllm_operator.prefixes.search.row_sort import sort_rows
from batchllm_operator.prefixes.token_table import TokenTable


@dataclass(frozen=True, slots=True, eq=False)
class RankedPrompts:
    """Prompts sorted so that those with a common prefix are neighbours.

    Attributes:
        prompt_idxs: [num_prompts] int64, the prompt at each rank.
        num_shared_tokens: [num_prompts] int64, LCP of each with the one before; 0 for the first.
        is_repeat: [num_prompts] bool, whether it equals the one before. Equal prompts are in
            the order of their indexes.
    """

    prompt_idxs: NDArray[np.int64]
    num_shared_tokens: NDArray[np.int64]
    is_repeat: NDArray[np.bool_]

    @classmethod
    def from_exact(
        cls,
        prompt_idxs: NDArray[np.int64],
        num_shared_tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> RankedPrompts:
        """From exact LCPs, which show equal prompts.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
        """
        ranked_lengths = lengths[prompt_idxs]
        return cls(prompt_idxs, num_shared_tokens, are_repeats(num_shared_tokens, ranked_lengths))

    def tree(self, lengths: NDArray[np.int64]) -> PrefixTree:
        """The prefix tree; see `build_prefix_tree`.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
        """
        return PrefixTree(
            self.prompt_idxs, *_build_nodes(self.num_shared_tokens, lengths[self.prompt_idxs])
        )

    def in_blocks(self, block_size: int) -> RankedPrompts:
        """With LCPs rounded down to whole blocks.

        Raises:
            PlanError: `block_size` is below 1.
        """
        num_shared = self.num_shared_tokens // _checked(block_size) * block_size
        return RankedPrompts(self.prompt_idxs, num_shared, self.is_repeat)

    def apart(self) -> RankedPrompts:
        """The same order, as if no prompt had anything in common with others."""
        return RankedPrompts(
            self.prompt_idxs, np.zeros_like(self.num_shared_tokens), self.is_repeat
        )

    def cached_tokens(self, lengths: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Tokens of each prompt that an engine with enough memory finds in its KV cache.

        Those that it shares with the prompt before, in whole blocks, yet never its last token,
        which vLLM always computes. The engine has to compute the rest, in any order of the prompts.
        If another engine takes over at some rank, it finds nothing for the prompt there.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
            block_size: tokens per block.

        Returns:
            [num_prompts] int64, by rank.

        Raises:
            PlanError: `block_size` is below 1.
        """
        shared = np.minimum(self.num_shared_tokens, lengths[self.prompt_idxs] - 1)
        cached: NDArray[np.int64] = np.maximum(shared, 0) // _checked(block_size) * block_size
        return cached

    def without_repeats(self) -> RankedPrompts:
        """The distinct prompts, with unchanged indexes."""
        kept = ~self.is_repeat
        return RankedPrompts(
            self.prompt_idxs[kept], self.num_shared_tokens[kept], self.is_repeat[kept]
        )


def _checked(block_size: int) -> int:
    if block_size < 1:
        raise PlanError(f"blocks hold at least 1 token, not {block_size}")
    return block_size


def build_prefix_tree(tokens: TokenTable) -> PrefixTree:
    """Finds every common prefix of prompts in memory.

    The tree doesn't depend on the order of the prompts, except that equal prompts are
    ranked by index. Takes about 120 bytes per prompt beside the table.
    """
    return rank_prompts(tokens).tree(tokens.lengths)


def rank_prompts(tokens: TokenTable) -> RankedPrompts:
    """Prompts in memory in lexicographic order, equal ones by index, with their LCPs."""
    rows = sort_rows(tokens)
    return RankedPrompts.from_exact(rows.row_idxs, rows.num_shared, tokens.lengths)


def are_repeats(num_shared: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of sorted sequences equals the one before, from their LCPs: [n]."""
    repeats: NDArray[np.bool_] = num_shared == lengths
    repeats[1:] &= lengths[1:] == lengths[:-1]
    repeats[:1] = False
    return repeats


@compiled
def _build_nodes(
    shared: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Parent, depth, first and last rank of all nodes in preorder, the root included."""
    num_prompts = len(shared)
    inner = np.empty((num_prompts, 3), dtype=np.int64)  # depth, first and last rank, as they close
    starting = np.zeros(num_prompts, dtype=np.int64)  # number of inner nodes starting at each rank
    open_depth = np.empty(num_prompts + 1, dtype=np.int64)
    open_begin = np.empty(num_prompts + 1, dtype=np.int64)
    num_open, num_inner = 0, 0
    for rank in range(1, num_prompts + 1):
        common = shared[rank] if rank < num_prompts else 0
        begin = rank - 1
        while num_open > 0 and open_depth[num_open - 1] > common:
            num_open -= 1
            begin = open_begin[num_open]
            starting[begin] += 1
            inner[num_inner, 0], inner[num_inner, 1] = open_depth[num_open], begin
            inner[num_inner, 2] = rank
            num_inner += 1
        if common > 0 and (num_open == 0 or open_depth[num_open - 1] < common):
            open_depth[num_open], open_begin[num_open] = common, begin
            num_open += 1

    num_nodes = 1 + num_inner + num_prompts
    depth = np.empty(num_nodes, dtype=np.int64)
    leaf_begin = np.empty(num_nodes, dtype=np.int64)
    leaf_end = np.empty(num_nodes, dtype=np.int64)
    depth[ROOT], leaf_begin[ROOT], leaf_end[ROOT] = 0, 0, num_prompts
    # `starting` becomes the place after the inner nodes that start at a rank: its leaf's.
    place = 1
    for rank in range(num_prompts):
        place += starting[rank]
        starting[rank] = place
        depth[place], leaf_begin[place], leaf_end[place] = lengths[rank], rank, rank + 1
        place += 1
    for item in range(num_inner):
        begin = inner[item, 1]
        starting[begin] -= 1  # deeper nodes close first and come after the others
        node = starting[begin]
        depth[node], leaf_begin[node], leaf_end[node] = inner[item, 0], begin, inner[item, 2]
    return _find_parents(leaf_begin, leaf_end), depth, leaf_begin, leaf_end


@compiled
def _find_parents(leaf_begin: NDArray[np.int64], leaf_end: NDArray[np.int64]) -> NDArray[np.int64]:
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
