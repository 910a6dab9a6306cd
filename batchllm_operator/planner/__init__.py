"""The global prefix plan, as pure functions over arrays.

    in memory  TokenTable -> build_prefix_tree
    on disk    TokenTable batches -> PromptStore, PrefixSearch -> RankedPrompts
                          -> make_requests -> RankedPrompts.tree
    then       choose_prefixes -> groups;  RankedPrompts.cached_tokens -> cut_into_shards
                          -> split_groups -> order_groups_by_subtree

All prompts of a job are known, so their common prefixes are found once, reduced to one
level by the paper's Algorithm 1 or an exact choice, cut into shards where neighbours share least,
and ordered by Eq. 4 in each shard.
`cost` predicts what that takes on a GPU (`gpu`) with a model (`model_shape`). `runahead`, which is
imported separately, chooses the groups whose prefixes several GPUs should compute together, and the
chunks. Lengths and counts are in tokens, ranges are half-open, and results are independent of
the order of the prompts. `PromptStore` writes a local file, in a folder that the
caller creates and removes. Nothing here depends on an engine.
"""

from batchllm_operator.planner.algorithm1 import (
    PrefixGroups,
    group_prefill_tokens,
    maximize_reuse,
    num_processed_tokens,
    saving_ratio,
)
from batchllm_operator.planner.choice import choose_prefixes
from batchllm_operator.planner.cost.attention import (
    AttentionKernels,
    AttentionRates,
    attention_kernels,
)
from batchllm_operator.planner.cost.gpu import GPU, find_gpu, read_gpu_table
from batchllm_operator.planner.cost.model_shape import MODEL_SHAPES, ModelShape, model_shape
from batchllm_operator.planner.cost.roofline import (
    BLOCK_SIZE,
    EngineLimits,
    Prediction,
    Work,
    WorkArrays,
    kv_capacity_tokens,
    predict,
    prompt_work,
    rates,
)
from batchllm_operator.planner.cost.step_time import StepWork, matrix_seconds, step_seconds
from batchllm_operator.planner.groups import optimal_saving_ratio, prefix_sharing_groups
from batchllm_operator.planner.order import order_groups, order_groups_by_subtree
from batchllm_operator.planner.prefixes.lcp_tree import RankedPrompts, build_prefix_tree
from batchllm_operator.planner.prefixes.prefix_tree import PrefixTree
from batchllm_operator.planner.prefixes.search import Advance, PrefixSearch
from batchllm_operator.planner.prefixes.segment_hashes import SegmentHasher
from batchllm_operator.planner.prompt_classes import PromptClasses
from batchllm_operator.planner.prompt_store import PromptStore
from batchllm_operator.planner.requests import Requests, make_requests
from batchllm_operator.planner.shards import cut_into_shards, imbalance, split_groups
from batchllm_operator.planner.sharing import PlanSharing, describe_sharing
from batchllm_operator.planner.token_table import TokenTable

__all__ = [
    "BLOCK_SIZE",
    "GPU",
    "MODEL_SHAPES",
    "Advance",
    "AttentionKernels",
    "AttentionRates",
    "EngineLimits",
    "ModelShape",
    "PlanSharing",
    "Prediction",
    "PrefixGroups",
    "PrefixSearch",
    "PrefixTree",
    "PromptClasses",
    "PromptStore",
    "RankedPrompts",
    "Requests",
    "SegmentHasher",
    "StepWork",
    "TokenTable",
    "Work",
    "WorkArrays",
    "attention_kernels",
    "build_prefix_tree",
    "choose_prefixes",
    "cut_into_shards",
    "describe_sharing",
    "find_gpu",
    "group_prefill_tokens",
    "imbalance",
    "kv_capacity_tokens",
    "make_requests",
    "matrix_seconds",
    "maximize_reuse",
    "model_shape",
    "num_processed_tokens",
    "optimal_saving_ratio",
    "order_groups",
    "order_groups_by_subtree",
    "predict",
    "prefix_sharing_groups",
    "prompt_work",
    "rates",
    "read_gpu_table",
    "saving_ratio",
    "split_groups",
    "step_seconds",
]
