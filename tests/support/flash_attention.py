"""vLLM's own FlashAttention without a GPU: its classes over a kernel in plain torch."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils, flash_attn

from batchllm_kernels.prefix_attention import PagedBatch, prefix_shared_attention
from batchllm_operator.vllm_plugin.attention import prefill


class VarlenReference:
    """Stands for `flash_attn_varlen_func`, and remembers the query lengths of each call."""

    def __init__(self) -> None:
        self.query_lens: list[list[int]] = []

    def __call__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: list[int],
        softcap: float,
        **others: Any,
    ) -> None:
        lens = cu_seqlens_q.diff().tolist()
        assert causal is True
        assert (max(lens), int(seqused_k.max())) <= (max_seqlen_q, max_seqlen_k)
        assert others.get("alibi_slopes") is others.get("s_aux") is None
        self.query_lens.append(lens)
        num_tokens = sum(lens)
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        batch = PagedBatch(cu_seqlens_q, seqused_k, block_table)
        settings: dict[str, Any] = {"window": window, "soft_cap": softcap or None}
        result = prefix_shared_attention(
            q[:num_tokens], k, v, batch, [], scale=softmax_scale, **settings
        )
        out[:num_tokens] = result.to(out.dtype)


def install(patch: Callable[..., None]) -> VarlenReference:
    """Let our backend find FlashAttention 2 on this machine.

    Args:
        patch: sets an attribute: `setattr`, or one that undoes it.
    """
    kernel = VarlenReference()
    for module in (fa_utils, flash_attn):
        patch(module, "get_flash_attn_version", lambda **_: 2)
    patch(flash_attn, "flash_attn_varlen_func", kernel)
    patch(prefill, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    return kernel


def common_of(batch: PagedBatch, num_tokens: int, **changes: Any) -> CommonAttentionMetadata:
    """What vLLM tells the builders of a step."""
    step = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc.clone(),
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_requests,
        num_actual_tokens=num_tokens,
        max_query_len=int(batch.query_start_loc.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=torch.arange(num_tokens),
    )
    return replace(step, **changes)
