"""The global prefix plan, as pure functions over arrays.

    TokenTable -> build_prefix_tree -> maximize_reuse -> order_groups -> assign_shards

All prompts of a job are known, so their common prefixes are found once, reduced to one
level by the paper's Algorithm 1, ordered by Eq. 4, and spread over workers. Lengths and
counts are in tokens, ranges are half-open, and every result is independent of the order
in which the prompts are given. Nothing here reads files or knows of an engine.
"""

from batchllm_operator.planner.groups import prefix_sharing_groups
from batchllm_operator.planner.order import order_groups
from batchllm_operator.planner.prefix_tree import PrefixTree, build_prefix_tree
from batchllm_operator.planner.reuse import (
    PrefixGroups,
    group_prefill_tokens,
    maximize_reuse,
    num_processed_tokens,
    saving_ratio,
)
from batchllm_operator.planner.shards import assign_shards, imbalance
from batchllm_operator.planner.token_table import TokenTable

__all__ = [
    "PrefixGroups",
    "PrefixTree",
    "TokenTable",
    "assign_shards",
    "build_prefix_tree",
    "group_prefill_tokens",
    "imbalance",
    "maximize_reuse",
    "num_processed_tokens",
    "order_groups",
    "prefix_sharing_groups",
    "saving_ratio",
]
