"""Attention over a shared prefix and a distinct part, computed apart and merged (paper, Eq. 1)."""

from batchllm_kernels.prefix_attention.reference import merge_partials, partial_attention

__all__ = ["merge_partials", "partial_attention"]
