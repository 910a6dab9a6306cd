"""Attention over shared prefix and distinct part separately, merged (paper, Eq. 1)."""

from batchllm_kernels.prefix_attention.api import StepPlan, StepPlanner, prefix_attention
from batchllm_kernels.prefix_attention.batch import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    SharedPrefix,
    UnsupportedError,
)
from batchllm_kernels.prefix_attention.config import ArchConfig, load_config
from batchllm_kernels.prefix_attention.grouping import Gate, find_shared_prefixes
from batchllm_kernels.prefix_attention.reference import prefix_shared_attention

__all__ = [
    "ArchConfig",
    "AttentionShape",
    "BatchLimits",
    "Gate",
    "PagedBatch",
    "SharedPrefix",
    "StepPlan",
    "StepPlanner",
    "UnsupportedError",
    "find_shared_prefixes",
    "load_config",
    "prefix_attention",
    "prefix_shared_attention",
]
