"""The global prefix plan, as pure functions over arrays.

    TokenTable batches -> PromptStore (disk) -> sort_prompts -> RankedPrompts -> make_requests
    RankedPrompts.tree -> choose_prefixes -> groups
    RankedPrompts.cached_tokens -> cut_into_shards -> split_groups -> order_groups_by_subtree

All prompts of a job are known, so their common prefixes are found once, reduced to one level by the
paper's Algorithm 1 or an exact choice, cut into shards where neighbours share least, and ordered by
Eq. 4 in each shard. Lengths and counts are in tokens, ranges are half-open, and results are
independent of the order of the prompts. Nothing here depends on an engine.
"""

from batchllm_operator.prefixes.algorithm1 import PrefixGroups as PrefixGroups
from batchllm_operator.prefixes.algorithm1 import group_prefill_tokens as group_prefill_tokens
from batchllm_operator.prefixes.algorithm1 import maximize_reuse as maximize_reuse
from batchllm_operator.prefixes.algorithm1 import saving_ratio as saving_ratio
from batchllm_operator.prefixes.cuts import cut_into_shards as cut_into_shards
from batchllm_operator.prefixes.cuts import imbalance as imbalance
from batchllm_operator.prefixes.cuts import split_groups as split_groups
from batchllm_operator.prefixes.exact import choose_prefixes as choose_prefixes
from batchllm_operator.prefixes.field_orders import ORDERING_BYTES as ORDERING_BYTES
from batchllm_operator.prefixes.field_orders import FieldOrders as FieldOrders
from batchllm_operator.prefixes.field_orders import hash_texts as hash_texts
from batchllm_operator.prefixes.order import BY_RATIO as BY_RATIO
from batchllm_operator.prefixes.order import order_groups_by_subtree as order_groups_by_subtree
from batchllm_operator.prefixes.order import prefix_sharing_groups as prefix_sharing_groups
from batchllm_operator.prefixes.prefix_hashes import NO_HASH as NO_HASH
from batchllm_operator.prefixes.prefix_hashes import hash_prefixes as hash_prefixes
from batchllm_operator.prefixes.prefix_tree import PrefixTree as PrefixTree
from batchllm_operator.prefixes.prefix_tree import RankedPrompts as RankedPrompts
from batchllm_operator.prefixes.prompt_sort import build_prefix_tree as build_prefix_tree
from batchllm_operator.prefixes.prompt_sort import num_equal as num_equal
from batchllm_operator.prefixes.prompt_sort import sort_prompts as sort_prompts
from batchllm_operator.prefixes.prompt_store import PromptStore as PromptStore
from batchllm_operator.prefixes.requests import PromptClasses as PromptClasses
from batchllm_operator.prefixes.requests import Requests as Requests
from batchllm_operator.prefixes.requests import make_requests as make_requests
from batchllm_operator.prefixes.requests import optimal_saving_ratio as optimal_saving_ratio
from batchllm_operator.prefixes.sharing import PlanSharing as PlanSharing
from batchllm_operator.prefixes.sharing import TreeNode as TreeNode
from batchllm_operator.prefixes.sharing import describe_sharing as describe_sharing
from batchllm_operator.prefixes.sharing import largest_nodes as largest_nodes
from batchllm_operator.prefixes.token_table import TokenTable as TokenTable
