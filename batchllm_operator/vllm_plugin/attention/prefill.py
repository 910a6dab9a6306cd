"""Prefill by vLLM's own FlashAttention, in the same steps as our kernel's decodes.

    rows of a step, decodes first:  [ at most `threshold` tokens: ours | the rest: FlashAttention ]

Both read the same paged cache by the same block tables, and write other rows of one output. vLLM
puts short rows first; a short one behind the first long one goes to FlashAttention too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from batchllm_operator.vllm_plugin.attention.settings import AttentionSettings


def obstacle(settings: AttentionSettings, kv_cache_spec: Any, layers: Sequence[Any]) -> str | None:
    """Why FlashAttention can't compute the prefill of a KV cache group's layers, which are ours."""
    if settings.prefill == "batchllm":
        return "as engine.extra_args says"
    if not current_platform.is_cuda():
        return "FlashAttention needs CUDA"
    if kv_cache_spec.dtype.itemsize == 1:
        return "an FP8 cache needs FP8 queries there"
    if len({layer.window for layer in layers}) > 1:
        return "layers with different windows share a KV cache group"
    if fa_utils.get_flash_attn_version(head_size=kv_cache_spec.head_size) is None:
        return "this vLLM has no FlashAttention for the GPU"
    return None


class FlashPrefill:
    """vLLM's FlashAttention for the long rows of a KV cache group.

    Args:
        kv_cache_spec: the group's.
        layers: our implementations of its layers, by name; without an `obstacle`.
        vllm_config: the engine's.
        device: the GPU.
        threshold: most query tokens of the rows that stay with our kernel.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layers: dict[str, Any],
        vllm_config: Any,
        device: torch.device,
        threshold: int,
    ) -> None:
        self.threshold = threshold
        with set_current_vllm_config(vllm_config):
            self.impls: dict[str, Any] = {name: _impl(each) for name, each in layers.items()}
            self._builder: Any = flash_attn.FlashAttentionMetadataBuilder(
                kv_cache_spec, list(layers), vllm_config, device
            )
        one = next(iter(self.impls.values()))
        self.version: int = one.vllm_flash_attn_version
        # vLLM looks for the layers' common window among its own layers only.
        self._builder.aot_sliding_window = one.sliding_window
        # No captured step has prefill: it needs no buffers that outlive it, and no bound on splits.
        self._builder.use_full_cuda_graph = False

    def split(self, common: CommonAttentionMetadata) -> tuple[int, int, Any]:
        """Divide a step's rows: without waiting for the device, by the host's query lengths.

        Returns:
            The number of leading rows that are ours, the first query token of the others, and
            vLLM's `FlashAttentionMetadata` of the others alone; None if there are none.
        """
        num_ours, num_others, first_token, num_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.threshold
        )
        if num_others == 0:
            return num_ours, first_token, None
        rows = slice(num_ours, common.num_reqs)
        bounds = slice(num_ours, common.num_reqs + 1)
        others = CommonAttentionMetadata(
            query_start_loc=common.query_start_loc[bounds] - first_token,
            query_start_loc_cpu=common.query_start_loc_cpu[bounds] - first_token,
            seq_lens=common.seq_lens[rows],
            num_reqs=num_others,
            num_actual_tokens=num_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[first_token:],
        )
        return num_ours, first_token, self._builder.build(0, others)


def _impl(layer: Any) -> Any:
    """vLLM's FlashAttention with the settings of one of our layers."""
    return flash_attn.FlashAttentionImpl(
        layer.num_heads,
        layer.head_size,
        layer.scale,
        layer.num_kv_heads,
        None,
        layer.window,
        layer.kv_cache_dtype,
        layer.soft_cap,
        kv_sharing_target_layer_name=layer.kv_sharing_target_layer_name,
    )
