"""Trees as deep as there are prompts."""

import numpy as np
import pytest

from batchllm_operator.prefixes import TokenTable, build_prefix_tree


@pytest.mark.parametrize("longest_first", [False, True])
def test_ten_thousand_levels(longest_first: bool) -> None:
    """Prompt k agrees with all longer ones in k tokens and then has a token of its own."""
    num_levels = 10_000
    path = np.random.default_rng(0).integers(0, 1000, num_levels, dtype=np.int32)
    lengths = np.arange(1, num_levels + 1)
    if longest_first:
        lengths = lengths[::-1]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([path[:length] for length in lengths])
    token_ids[offsets[1:] - 1] = 2000
    tree = build_prefix_tree(TokenTable(token_ids, offsets))
    assert len(tree.parent) == 1 + num_levels + num_levels - 2  # the root branches, too
    assert tree.depth.max() == num_levels
