"""Predicts KV-Runahead: a chain of replicas computes one prefix.

    ModelShape, GPU -> ReplicaCost, Link -> Chain -> search_split -> SplitTable
    groups -> choose_placement -> the groups to compute by a chain

After Cho et al., *KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation* (ICML 2024). A *split* is a tuple of tokens, one chunk per replica, that sum to the
prefix; each but the last is a multiple of the block size.
"""

from batchllm_operator.runahead.planning.all_gather import AllGather, all_gather_ttft
from batchllm_operator.runahead.planning.chain import Chain, ChainTimes, Goal, Link, Split
from batchllm_operator.runahead.planning.makespans import GroupLoad, Makespans, PlacementSettings
from batchllm_operator.runahead.planning.policy import Placement, choose_placement
from batchllm_operator.runahead.planning.replica_cost import ReplicaCost
from batchllm_operator.runahead.planning.search import even_split, search_split
from batchllm_operator.runahead.planning.split_table import SplitTable

__all__ = [
    "AllGather",
    "Chain",
    "ChainTimes",
    "Goal",
    "GroupLoad",
    "Link",
    "Makespans",
    "Placement",
    "PlacementSettings",
    "ReplicaCost",
    "Split",
    "SplitTable",
    "all_gather_ttft",
    "choose_placement",
    "even_split",
    "search_split",
]
