"""What an order of prompts keeps alive in a cache of KV blocks that evicts the oldest."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.prefix_tree import PrefixTree


def cached_tokens(
    tree: PrefixTree, prompt_idxs: Sequence[int] | NDArray[np.int64], size: int, num_blocks: int
) -> int:
    """Prompt tokens that are found in the cache if prompts are computed one after the other.

    A block is `size` tokens of a prompt, counted from its beginning, and is shared by all prompts
    that agree up to its end; tokens after the last full block aren't cached. A prompt finds the
    blocks from its first to the last that is still there without a gap, yet not all of its tokens:
    one at least is computed. Then its blocks are the newest, the first block newest of all, and
    the oldest blocks beyond `num_blocks` are gone. This is how vLLM caches prefixes, without
    outputs and without other prompts at the same time.

    With a cache that holds every block the result is the multi-level optimum of all orders,
    in whole blocks. Takes time linear in the number of blocks.

    Args:
        tree: the prompts' tree.
        prompt_idxs: prompts in the order in which they are computed.
        size: tokens per block.
        num_blocks: blocks that the cache holds.
    """
    leaf_of_prompt = dict(zip(tree.prompt_idxs.tolist(), tree.leaves.tolist(), strict=True))
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()  # (node, block of a path to it)
    num_found = 0
    for idx in prompt_idxs:
        node = leaf = leaf_of_prompt[int(idx)]
        blocks: list[tuple[int, int]] = []  # the last one first
        while node:
            above = parent[node]
            own = range(depth[above] // size, depth[node] // size)
            blocks += [(node, block) for block in reversed(own)]
            node = above
        num_hits = sum(1 for _ in takewhile(cache.__contains__, reversed(blocks)))
        num_found += min(num_hits, max(depth[leaf] - 1, 0) // size)
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_found * size
