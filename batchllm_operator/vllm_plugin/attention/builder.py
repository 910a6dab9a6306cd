"""Plans each step: requests that share a prefix are found by their block tables, on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from batchllm_kernels.prefix_attention import (
    AttentionShape,
    BatchLimits,
    PagedBatch,
    StepPlan,
    StepPlanner,
    UnsupportedError,
)
from batchllm_kernels.prefix_attention.api import Impl
from batchllm_operator.errors import SpecError
from batchllm_operator.vllm_plugin.attention.prefill import FlashPrefill, obstacle
from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings


@dataclass
class PrefixAttentionMetadata(AttentionMetadata):
    """A step's data for the layers of a KV cache group. vLLM subclasses it."""

    plan: StepPlan | None
    """Our kernel's rows, if it has any."""
    prefill: Any
    """vLLM's `FlashAttentionMetadata` of the rows behind ours, if there are any."""
    prefill_token: int
    """The first query token of those."""
    num_actual_tokens: int
    slot_mapping: Tensor  # [num_actual_tokens]


class PrefixAttentionBuilder(AttentionMetadataBuilder[PrefixAttentionMetadata]):
    """Plans each step of a KV cache group once, for all of its layers.

    Tells the layers their planner, and what computes their prefill.

    Raises:
        SpecError: the layers or their cache aren't supported, or FlashAttention was asked for and
            can't compute their prefill.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = AttentionSettings.from_additional_config(vllm_config.additional_config)
        drafts, scheduler = num_drafts(vllm_config), vllm_config.scheduler_config
        most_tokens = scheduler.max_num_batched_tokens + drafts * scheduler.max_num_seqs
        limits = BatchLimits(scheduler.max_num_seqs, most_tokens)
        try:
            shape = layer_shape(kv_cache_spec, layer_names, vllm_config)
            self.planner = StepPlanner(shape, limits, impl=chosen_impl(settings), device=device)
        except UnsupportedError as error:
            raise refusal(f"this model: {error}") from error
        context = vllm_config.compilation_config.static_forward_context
        self._layers = {name: context[name].impl for name in layer_names}
        for layer in self._layers.values():
            layer.planner = self.planner
        self._flash = self._make_flash(settings)
        # vLLM then puts rows of as many tokens first. (Its newer runner always sorts them.)
        self.reorder_batch_threshold = self._flash.threshold if self._flash else None

    def _make_flash(self, settings: AttentionSettings) -> FlashPrefill | None:
        """FlashAttention for prefill, where it can compute that; says so to the layers."""
        reason = obstacle(settings, self.kv_cache_spec, list(self._layers.values()))
        if reason is not None:
            if settings.prefill == "flash_attention":
                raise refusal(f"prefill: flash_attention here: {reason}")
            for layer in self._layers.values():
                layer.flash, layer.prefill = None, f"prefill in the same kernel ({reason})"
            return None
        chosen = settings.decode_threshold or self.planner.config.gate.max_member_tokens
        threshold = max(chosen, 1 + num_drafts(self.vllm_config))
        flash = FlashPrefill(
            self.kv_cache_spec, self._layers, self.vllm_config, self.device, threshold
        )
        for name, layer in self._layers.items():
            layer.flash = flash.impls[name]
            layer.prefill = (
                f"prefill (more than {threshold} tokens) by vLLM's FlashAttention {flash.version}"
            )
        return flash

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs for decode steps if the settings ask for them; always piecewise ones.

        A captured launch has a fixed grid and reads its work from the planner's buffers, which
        `build` fills before each replay. A captured step has one token a row, so no prefill.
        """
        settings = AttentionSettings.from_additional_config(vllm_config.additional_config)
        # Scales are found in the first steps; a graph would keep their initial values.
        is_calibrating = getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        if settings.decode_graphs and not is_calibrating:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PrefixAttentionMetadata:
        """Plan a step. Replaces the previous plan: all layers of a step use one plan.

        Raises:
            SpecError: the step isn't causal.
            UnsupportedError: it has more requests or tokens than vLLM's settings allow.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise refusal("attention that isn't causal")
        limits, num_ours = self.planner.limits, common.num_reqs
        if common.num_actual_tokens > limits.max_num_tokens:
            raise UnsupportedError(
                f"the step has {common.num_actual_tokens} tokens, the limit is "
                f"{limits.max_num_tokens}"
            )
        prefill, token, plan = None, 0, None
        if self._flash is not None:
            num_ours, token, prefill = self._flash.split(common)
        if num_ours:
            batch = PagedBatch(
                common.query_start_loc[: num_ours + 1],
                common.seq_lens[:num_ours],
                common.block_table_tensor[:num_ours],
            )
            plan = self.planner.plan(batch)
        return PrefixAttentionMetadata(
            plan, prefill, token, common.num_actual_tokens, common.slot_mapping
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PrefixAttentionMetadata:
        """Plan a step to capture, with contexts no longer than the query: tables mean nothing yet.

        Overwrites the lengths in vLLM's buffer, as its own backends do.
        """
        common_attn_metadata.seq_lens.fill_(common_attn_metadata.max_query_len)
        return self.build(0, common_attn_metadata)


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


def num_drafts(vllm_config: Any) -> int:
    """Most draft tokens of a decoding request in a step."""
    return getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
