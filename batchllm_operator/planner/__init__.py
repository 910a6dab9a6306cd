"""The global prefix plan, as pure functions over arrays.

    TokenTable -> build_prefix_tree or build_block_tree -> choose_prefixes
               -> order_groups or order_groups_by_subtree -> split_large_groups -> assign_shards

All prompts of a job are known, so their common prefixes are found once, reduced to one
level by the paper's Algorithm 1 or an exact choice, ordered by Eq. 4, and spread over
workers. Lengths and counts are in tokens, ranges are half-open, and every result is
independent of the order in which the prompts are given. Only `plan`, the persisted form,
touches files (local ones), and nothing knows of an engine.
"""

from batchllm_operator.planner.block_cache import cached_tokens
from batchllm_operator.planner.blocks import build_block_tree
from batchllm_operator.planner.choice import PrefixChoice, choose_prefixes
from batchllm_operator.planner.groups import prefix_sharing_groups
from batchllm_operator.planner.order import order_groups, order_groups_by_subtree
from batchllm_operator.planner.prefix_tree import PrefixTree, build_prefix_tree
from batchllm_operator.planner.reuse import (
    PrefixGroups,
    group_prefill_tokens,
    maximize_reuse,
    num_processed_tokens,
    saving_ratio,
)
from batchllm_operator.planner.shards import assign_shards, imbalance, split_large_groups
from batchllm_operator.planner.token_table import TokenTable

__all__ = [
    "PrefixChoice",
    "PrefixGroups",
    "PrefixTree",
    "TokenTable",
    "assign_shards",
    "build_block_tree",
    "build_prefix_tree",
    "cached_tokens",
    "choose_prefixes",
    "group_prefill_tokens",
    "imbalance",
    "maximize_reuse",
    "num_processed_tokens",
    "order_groups",
    "order_groups_by_subtree",
    "prefix_sharing_groups",
    "saving_ratio",
    "split_large_groups",
]
