"""Prompts in, groups out: the paper's standalone preprocessing (Sec. 5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchllm_operator.prefixes.algorithm1 import maximize_reuse, saving_ratio
from batchllm_operator.prefixes.order import BY_RATIO, order_groups_by_subtree
from batchllm_operator.prefixes.requests import make_requests
from batchllm_operator.prefixes.search.lcp_tree import build_prefix_tree, rank_prompts
from batchllm_operator.prefixes.token_table import TokenTable


def optimal_saving_ratio(tokens: TokenTable, block_size: int, *, merge: bool) -> float:
    """Eq. 2 for one engine with unbounded memory.

    Args:
        tokens: the prompts of all rows.
        block_size: tokens per block of its KV cache.
        merge: whether equal prompts are one request.

    Raises:
        PlanError: `block_size` is below 1.
    """
    rows = np.arange(len(tokens))
    requests, ranked = make_requests(tokens, rank_prompts(tokens), rows, merge=merge)
    cached = ranked.cached_tokens(requests.lengths, block_size)
    return saving_ratio(int(requests.lengths.sum() - cached.sum()), tokens.num_tokens)


def prefix_sharing_groups(
    prompts: Sequence[Sequence[int]],
) -> list[tuple[list[int], list[list[int]]]]:
    """Groups of prompts in the form of Sec. 5, in scheduling order.

    Assumes equal output lengths. For small sets and experiments: a plan keeps prompt indexes
    instead of copies of the tokens.

    Args:
        prompts: token ids of each prompt.

    Returns:
        Per group, (prefix token ids, [distinct token ids of each member]). A prompt that
        shares nothing is ([], [all of its token ids]).

    Raises:
        PlanError: as `TokenTable.from_lists`.
    """
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    groups = maximize_reuse(tree)
    one_each = np.ones(len(tokens), dtype=np.int64)
    result = []
    for group_idx in order_groups_by_subtree(groups, tree, one_each, BY_RATIO).tolist():
        cut = int(groups.num_prefix_tokens[group_idx])
        members = [tokens.prompt(idx).tolist() for idx in groups.members(group_idx).tolist()]
        result.append((members[0][:cut], [member[cut:] for member in members]))
    return result
