"""The global prefix plan, as pure functions over arrays.

    TokenTable batches -> PromptStore (disk) -> sort_prompts -> RankedPrompts -> make_requests
    RankedPrompts.tree -> choose_prefixes -> groups
    RankedPrompts.cached_tokens -> cut_into_shards -> split_groups -> order_groups_by_subtree

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
from batchllm_operator.prefixes.prefix_tree import PrefixTree, RankedPrompts
from batchllm_operator.prefixes.prompt_classes import PromptClasses
from batchllm_operator.prefixes.prompt_sort import (
    Advance,
    build_prefix_tree,
    ignore,
    num_equal,
    sort_prompts,
)
from batchllm_operator.prefixes.prompt_store import PromptStore
from batchllm_operator.prefixes.requests import Requests, make_requests, optimal_saving_ratio
from batchllm_operator.prefixes.segment_hashes import last_hashes
from batchllm_operator.prefixes.sharing import PlanSharing, describe_sharing
from batchllm_operator.prefixes.token_table import TokenTable

__all__ = [
    "BY_RATIO",
    "Advance",
    "PlanSharing",
    "PrefixGroups",
    "PrefixTree",
    "PromptClasses",
    "PromptStore",
    "RankedPrompts",
    "Requests",
    "TokenTable",
    "build_prefix_tree",
    "choose_prefixes",
    "cut_into_shards",
    "describe_sharing",
    "group_prefill_tokens",
    "ignore",
    "imbalance",
    "last_hashes",
    "make_requests",
    "maximize_reuse",
    "num_equal",
    "optimal_saving_ratio",
    "order_groups_by_subtree",
    "prefix_sharing_groups",
    "saving_ratio",
    "sort_prompts",
    "split_groups",
]
