"""The global prefix plan, as pure functions over arrays.

    in memory  TokenTable -> build_prefix_tree
    on disk    TokenTable batches -> PromptStore, PrefixSearch -> RankedPrompts
                          -> make_requests -> RankedPrompts.tree
    then       choose_prefixes -> groups;  RankedPrompts.cached_tokens -> cut_into_shards
                          -> split_groups -> order_groups_by_subtree

All prompts of a job are known, so their common prefixes are found once, reduced to one
level by the paper's Algorithm 1 or an exact choice, cut into shards where neighbours share least,
and ordered by Eq. 4 in each shard.
Lengths and counts are in tokens, ranges are half-open, and results are independent of
the order of the prompts. `PromptStore` writes a local file, in a folder that the
caller creates and removes. Nothing here depends on an engine.
"""

from batchllm_operator.prefixes.algorithm1 import (
    PrefixGroups,
    group_prefill_tokens,
    maximize_reuse,
    saving_ratio,
)
from batchllm_operator.prefixes.cuts import cut_into_shards, imbalance, split_groups
from batchllm_operator.prefixes.exact import choose_prefixes
from batchllm_operator.prefixes.order import (
    BY_RATIO,
    order_groups_by_subtree,
    prefix_sharing_groups,
)
from batchllm_operator.prefixes.prompt_classes import PromptClasses
from batchllm_operator.prefixes.prompt_store import PromptStore
from batchllm_operator.prefixes.requests import Requests, make_requests, optimal_saving_ratio
from batchllm_operator.prefixes.search.lcp_tree import RankedPrompts, build_prefix_tree
from batchllm_operator.prefixes.search.prefix_search import Advance, PrefixSearch
from batchllm_operator.prefixes.search.prefix_tree import PrefixTree
from batchllm_operator.prefixes.search.segment_hashes import SegmentHasher
from batchllm_operator.prefixes.sharing import PlanSharing, describe_sharing
from batchllm_operator.prefixes.token_table import TokenTable

__all__ = [
    "BY_RATIO",
    "Advance",
    "PlanSharing",
    "PrefixGroups",
    "PrefixSearch",
    "PrefixTree",
    "PromptClasses",
    "PromptStore",
    "RankedPrompts",
    "Requests",
    "SegmentHasher",
    "TokenTable",
    "build_prefix_tree",
    "choose_prefixes",
    "cut_into_shards",
    "describe_sharing",
    "group_prefill_tokens",
    "imbalance",
    "make_requests",
    "maximize_reuse",
    "optimal_saving_ratio",
    "order_groups_by_subtree",
    "prefix_sharing_groups",
    "saving_ratio",
    "split_groups",
]
