"""What an order of prompts keeps alive in a cache of KV blocks that evicts the oldest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.prefix_tree import PrefixTree

_NONE = -1
_UNCACHED = -2


def cached_tokens(
    tree: PrefixTree, prompt_idxs: NDArray[np.int64], block_size: int, num_blocks: int
) -> int:
    """Prompt tokens that are found in the cache if prompts are computed one after the other.

    A block is `block_size` tokens of a prompt, counted from its beginning, and is shared by
    all prompts that agree up to its end; tokens after the last full block aren't cached. A
    prompt finds the blocks from its first to the last that is still there without a gap, yet
    not all of its tokens: one at least is computed. Then its blocks are the newest, the first
    block newest of all, and the oldest blocks beyond `num_blocks` are gone. This is how vLLM
    caches prefixes, without outputs and without other prompts at the same time.

    With a cache that holds every block the result is the multi-level optimum of all orders,
    in whole blocks. Takes time and memory linear in the number of blocks.

    Args:
        tree: the prompts' tree.
        prompt_idxs: prompts in the order in which they are computed, such as the
            `member_idxs` of ordered groups; int64, in [0, num_prompts).
        block_size: tokens per block, at least 1.
        num_blocks: blocks that the cache holds, at least 1.

    Raises:
        PlanError: an argument is out of its range.
    """
    if block_size < 1 or num_blocks < 1:
        raise PlanError(f"a cache of {num_blocks} blocks of {block_size} tokens can't hold any")
    if len(prompt_idxs) == 0:
        return 0
    if not (prompt_idxs.min() >= 0 and prompt_idxs.max() < tree.num_prompts):
        raise PlanError(f"prompt indexes must lie in [0, {tree.num_prompts})")
    leaf_of_prompt = np.empty(tree.num_prompts, dtype=np.int64)
    leaf_of_prompt[tree.prompt_idxs] = tree.leaves
    blocks_to = tree.depth // block_size
    first_block = np.zeros(tree.num_nodes + 1, dtype=np.int64)
    np.cumsum(blocks_to[1:] - blocks_to[tree.parent[1:]], out=first_block[2:])
    return int(
        _count_hits(
            tree.parent,
            tree.depth,
            first_block,
            leaf_of_prompt[prompt_idxs],
            block_size,
            num_blocks,
        )
        * block_size
    )


@compiled
def _count_hits(
    parent: NDArray[np.int64],
    depth: NDArray[np.int64],
    first_block: NDArray[np.int64],
    leaves: NDArray[np.int64],
    block_size: int,
    num_blocks: int,
) -> int:
    """Blocks found; node v has the blocks [first_block[v], first_block[v + 1])."""
    newer = np.full(first_block[-1], _UNCACHED, dtype=np.int64)
    older = np.full(first_block[-1], _UNCACHED, dtype=np.int64)
    path = np.empty(depth.max() // block_size, dtype=np.int64)
    ends = np.array([_NONE, _NONE])  # the newest and the oldest block
    num_cached, num_hits = 0, 0
    for leaf in leaves:
        node, length = leaf, depth[leaf] // block_size
        position = length
        while position > 0:
            for block in range(first_block[node + 1] - 1, first_block[node] - 1, -1):
                position -= 1
                path[position] = block
            node = parent[node]
        reusable = 0
        while reusable < length and older[path[reusable]] != _UNCACHED:
            reusable += 1
        num_hits += min(reusable, max(depth[leaf] - 1, 0) // block_size)
        for block in path[:length][::-1]:
            if older[block] != _UNCACHED:
                _unlink(newer, older, ends, block)
            else:
                num_cached += 1
            newer[block], older[block] = _NONE, ends[0]
            if ends[0] == _NONE:
                ends[1] = block
            else:
                newer[ends[0]] = block
            ends[0] = block
            if num_cached > num_blocks:
                _unlink(newer, older, ends, ends[1])
                num_cached -= 1
    return num_hits


@compiled
def _unlink(
    newer: NDArray[np.int64], older: NDArray[np.int64], ends: NDArray[np.int64], block: int
) -> None:
    after, before = newer[block], older[block]
    if after == _NONE:
        ends[0] = before
    else:
        older[after] = before
    if before == _NONE:
        ends[1] = after
    else:
        newer[before] = after
    older[block] = _UNCACHED
