"""The cache of blocks that orders of prompts are compared by."""

from __future__ import annotations

import pytest
from support.benchmark_modules import load

from batchllm_operator.prefixes import TokenTable, build_prefix_tree

cached_tokens = load("block_cache").cached_tokens


@pytest.mark.parametrize(
    ("order", "num_blocks", "expected"),
    [
        ([1, 0, 1], 100, 6),  # its last token is computed
        ([1, 0, 1], 6, 4),  # the last blocks are the first to go
        ([1, 0, 1], 4, 0),
        ([0, 3], 4, 4),  # of 5 tokens, 2 blocks; another's last one isn't whole
        ([], 6, 0),
    ],
)
def test_the_oldest_blocks_go(order: list[int], num_blocks: int, expected: int) -> None:
    prompts = [[1] * 8, [2] * 8, [3] * 8, [1] * 5]
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    assert cached_tokens(tree, order, 2, num_blocks) == expected
