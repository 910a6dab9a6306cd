"""Prefix trees at the granularity of KV blocks, which is all that an engine's cache can share.

A block is `block_size` consecutive tokens of a prompt, counted from its beginning; tokens
after the last full block belong to no block. Each block is replaced by a 31-bit hash of its
tokens, its symbol, so that a prompt needs 4 bytes per block while the tree grows. Hashes
collide, and a tree over them might join prompts that differ. So the tree is checked against
the tokens, and where two different blocks were taken for one, all blocks with their symbol
get one from another hash. A symbol is a function of the block's tokens at all times: equal
blocks never part, and what remains joined has been compared, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.jit import compiled
from batchllm_operator.planner.prefix_tree import ROOT, PrefixTree, build_prefix_tree, num_equal
from batchllm_operator.planner.token_table import TokenTable

SYMBOL_BITS = 31  # as many as a token id has
_MAX_HASHES = 100  # with 31 bits, two are rarely needed and three next to never
_NO_MISMATCH = -1
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio


def build_block_tree(
    tokens: TokenTable, block_size: int, *, symbol_bits: int = SYMBOL_BITS
) -> PrefixTree:
    """Finds every common prefix of the prompts that ends with a full block.

    Depths are in tokens: whole blocks in inner nodes, and a leaf's depth is its prompt's
    length. The ranks are in order of the blocks' symbols instead of lexicographic order, and
    prompts with the same blocks are in order of a hash of all their tokens. So neither the
    shape nor the order depends on the order of the prompts, and equal prompts are ranked by
    index, as in the tree of `build_prefix_tree`.

    Beside the tokens and the tree, needs 4 bytes per block and about 40 per prompt. Reads all
    tokens twice to hash them, and the shared ones once more to compare them.

    Args:
        tokens: the prompts.
        block_size: tokens per block, at least 1.
        symbol_bits: 1 to 31; fewer make collisions more likely, which tests are after.

    Raises:
        PlanError: an argument is out of its range, or symbols are too short to tell the
            blocks apart.
    """
    if not 1 <= symbol_bits <= SYMBOL_BITS:
        raise PlanError(f"block symbols have 1 to {SYMBOL_BITS} bits, not {symbol_bits}")
    if block_size < 1:
        raise PlanError(f"blocks hold at least 1 token, not {block_size}")
    order = np.argsort(_hash_prompts(tokens.token_ids, tokens.offsets), kind="stable")
    offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(tokens.lengths[order] // block_size, out=offsets[1:])
    blocks = _Blocks(tokens, order, offsets, block_size, symbol_bits)
    symbols = np.zeros(offsets[-1], dtype=np.int32)
    colliding = np.zeros(1, dtype=np.int32)  # to begin with, all blocks have the symbol 0
    for seed in range(_MAX_HASHES):
        blocks.give_symbols(symbols, colliding, seed)
        tree = build_prefix_tree(TokenTable(symbols, offsets))
        colliding = blocks.find_collisions(symbols, tree)
        if len(colliding) == 0:
            return blocks.in_tokens(tree)
    raise PlanError(f"symbols of {symbol_bits} bits don't tell all blocks apart")


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Full blocks of the prompts, listed prompt after prompt.

    Attributes:
        tokens: the prompts.
        order: [num_prompts] int64, the prompt of each row.
        offsets: [num_prompts + 1] int64, where the blocks of each row begin.
        block_size: tokens per block.
        symbol_bits: bits of a symbol.
    """

    tokens: TokenTable
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    block_size: int
    symbol_bits: int

    def give_symbols(
        self, symbols: NDArray[np.int32], colliding: NDArray[np.int32], seed: int
    ) -> None:
        """Replaces each symbol that is among `colliding`, ascending, in place."""
        begins = self.tokens.offsets[self.order]
        shift = 64 - self.symbol_bits
        _give_symbols(
            self.tokens.token_ids,
            begins,
            self.offsets,
            self.block_size,
            symbols,
            colliding,
            seed,
            shift,
        )

    def find_collisions(self, symbols: NDArray[np.int32], tree: PrefixTree) -> NDArray[np.int32]:
        """Symbols, ascending, that stand for different blocks where the tree joins prompts."""
        shared = np.zeros(tree.num_prompts + 1, dtype=np.int64)
        # The topmost node that begins at a rank has the parent of this rank and the one before;
        # of several values for one rank, the last is kept.
        shared[tree.leaf_begin[:ROOT:-1]] = tree.depth[tree.parent[:ROOT:-1]]
        begins = self.tokens.offsets[self.order]
        position = _find_mismatches(
            self.tokens.token_ids, begins[tree.prompt_idxs], shared, self.block_size
        )
        ranks = np.flatnonzero(position != _NO_MISMATCH)
        blocks = self.offsets[tree.prompt_idxs[ranks]] + position[ranks] // self.block_size
        return np.unique(symbols[blocks])

    def in_tokens(self, tree: PrefixTree) -> PrefixTree:
        """A tree over symbols with the prompts' indexes and with depths in tokens."""
        prompt_idxs = self.order[tree.prompt_idxs]
        depth = tree.depth * self.block_size
        depth[tree.leaves] = self.tokens.lengths[prompt_idxs]
        return PrefixTree(prompt_idxs, tree.parent, depth, tree.leaf_begin, tree.leaf_end)


@compiled
def _hash(token_ids: NDArray[np.int32], seed: int) -> np.uint64:
    value = np.uint64(seed) * _ODD + _ODD
    for token_id in token_ids:
        value = (value ^ np.uint64(token_id)) * _ODD
        value ^= value >> np.uint64(29)
    return value * _ODD


@compiled
def _hash_prompts(token_ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    hashes = np.empty(len(offsets) - 1, dtype=np.uint64)
    for idx in range(len(hashes)):
        hashes[idx] = _hash(token_ids[offsets[idx] : offsets[idx + 1]], 0)
    return hashes


@compiled
def _give_symbols(
    token_ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    offsets: NDArray[np.int64],
    block_size: int,
    symbols: NDArray[np.int32],
    colliding: NDArray[np.int32],
    seed: int,
    shift: int,
) -> None:
    for row in range(len(begins)):
        begin = begins[row]
        for block in range(offsets[row], offsets[row + 1]):
            place = np.searchsorted(colliding, symbols[block])
            if place < len(colliding) and colliding[place] == symbols[block]:
                value = _hash(token_ids[begin : begin + block_size], seed)
                symbols[block] = np.int32(value >> np.uint64(shift))
            begin += block_size


@compiled
def _find_mismatches(
    token_ids: NDArray[np.int32],
    begins: NDArray[np.int64],
    shared: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.int64]:
    """Per rank, where its prompt first differs from the one before in what they should share.

    Args:
        begins: [num_prompts] where the prompt of each rank begins in `token_ids`.
        shared: [num_prompts + 1] blocks that each rank's prompt shares with the one before.

    Returns:
        [num_prompts] position in the prompt, -1 if all is as it should be.
    """
    position = np.full(len(begins), _NO_MISMATCH, dtype=np.int64)
    for rank in range(1, len(begins)):
        num_tokens = shared[rank] * block_size
        found = num_equal(
            token_ids[begins[rank - 1] : begins[rank - 1] + num_tokens],
            token_ids[begins[rank] : begins[rank] + num_tokens],
        )
        if found < num_tokens:
            position[rank] = found
    return position
