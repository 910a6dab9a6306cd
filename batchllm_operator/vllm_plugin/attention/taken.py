"""Checks that our attention supports a model and its KV cache."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from batchllm_kernels.prefix_attention import AttentionShape, BatchLimits
from batchllm_kernels.prefix_attention.api import Impl
from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings


def refusal(constraint: str) -> SpecError:
    """The error for something that our attention doesn't support."""
    return SpecError(
        f"engine.attention: batchllm doesn't take {constraint}; engine.attention: stock does"
    )


def chosen_impl(settings: AttentionSettings) -> Impl:
    """The implementation of attention for this platform."""
    return settings.impl or ("reference" if current_platform.is_cpu() else "triton")


def layer_shape(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> AttentionShape:
    """Heads and blocks of the layers of a KV cache group.

    Raises:
        SpecError: the layers or their cache aren't supported.
    """
    layers = vllm_config.compilation_config.static_forward_context
    num_q_heads = {layers[name].num_heads for name in layer_names}
    if len(num_q_heads) != 1:
        raise refusal(f"layers with {sorted(num_q_heads)} query heads that share a KV cache group")
    if getattr(kv_cache_spec, "attention_chunk_size", None) is not None:
        raise refusal("attention in chunks of the context")
    head_dim, dtype = kv_cache_spec.head_size, kv_cache_spec.dtype
    if getattr(kv_cache_spec, "head_size_v", None) not in (None, head_dim):
        raise refusal(f"keys of {head_dim} and values of {kv_cache_spec.head_size_v} elements")
    if dtype.itemsize > 1 and dtype != vllm_config.model_config.dtype:
        raise refusal(f"a KV cache of {dtype} with a model in {vllm_config.model_config.dtype}")
    return AttentionShape(
        num_q_heads=num_q_heads.pop(),
        num_kv_heads=kv_cache_spec.num_kv_heads,
        head_dim=head_dim,
        block_size=kv_cache_spec.block_size,
        kv_bits=8 if dtype.itemsize == 1 else 16,
    )


def batch_limits(vllm_config: Any) -> BatchLimits:
    """Limits of a step; with drafts, each request may have a few more tokens."""
    scheduler = vllm_config.scheduler_config
    drafts = num_drafts(vllm_config) * scheduler.max_num_seqs
    return BatchLimits(
        max_num_requests=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens + drafts,
    )


def num_drafts(vllm_config: Any) -> int:
    """Most draft tokens of a decoding request in a step."""
    return getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
