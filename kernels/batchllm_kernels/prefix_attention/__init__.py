"""Attention over shared prefix and distinct part separately, merged (paper, Eq. 1)."""

from batchllm_kernels.prefix_attention.api import StepPlan as StepPlan
from batchllm_kernels.prefix_attention.api import StepPlanner as StepPlanner
from batchllm_kernels.prefix_attention.api import prefix_attention as prefix_attention
from batchllm_kernels.prefix_attention.batch import AttentionShape as AttentionShape
from batchllm_kernels.prefix_attention.batch import BatchLimits as BatchLimits
from batchllm_kernels.prefix_attention.batch import PagedBatch as PagedBatch
from batchllm_kernels.prefix_attention.batch import SharedPrefix as SharedPrefix
from batchllm_kernels.prefix_attention.batch import UnsupportedError as UnsupportedError
from batchllm_kernels.prefix_attention.config import ArchConfig as ArchConfig
from batchllm_kernels.prefix_attention.config import load_config as load_config
from batchllm_kernels.prefix_attention.grouping import Gate as Gate
from batchllm_kernels.prefix_attention.grouping import find_shared_prefixes as find_shared_prefixes
from batchllm_kernels.prefix_attention.reference import (
    prefix_shared_attention as prefix_shared_attention,
)
