"""Random batches over a paged KV cache, with NaN wherever no request may read."""

from dataclasses import dataclass, field

import torch
from kernel_settings.workloads import Group, lay_out
from torch import Tensor

from batchllm_kernels.prefix_attention import AttentionShape, PagedBatch

__all__ = ["NAN", "AttentionCase", "Group", "make_case"]
NAN = float("nan")


@dataclass(frozen=True)
class AttentionCase:
    """A batch with everything that attention over it needs."""

    shape: AttentionShape
    batch: PagedBatch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    groups: tuple[tuple[int, ...], ...] = field(default=())
    """Rows of each group."""

    @property
    def num_tokens(self) -> int:
        return int(self.batch.query_start_loc[-1])


def make_case(
    shape: AttentionShape,
    groups: list[Group],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    num_padding: int = 0,
    layout: str = "separate",
) -> AttentionCase:
    """A batch of these groups, its rows shuffled and its blocks scattered.

    Args:
        shape: heads and blocks.
        groups: prefixes in whole blocks; one member makes a request that shares nothing.
        seed: of everything random.
        dtype: of the queries, and of the cache unless `kv_dtype` says otherwise.
        kv_dtype: FP8.
        num_padding: rows without query tokens at the end.
        layout: "separate" caches, "interleaved" (blocks of K, V in one tensor) or "heads_first"
            (K and V of a head side by side).
    """
    rng = torch.Generator().manual_seed(seed)
    made = lay_out(groups, shape.block_size, rng, num_padding=num_padding)

    def cache() -> Tensor:
        size = (*made.written.shape, shape.num_kv_heads, shape.head_dim)
        kv = torch.randn(size, generator=rng)
        kv[~made.written] = NAN
        return kv.to(kv_dtype or dtype)

    k, v = cache(), cache()
    if layout == "interleaved":
        both = torch.stack([k, v], dim=1)
        k, v = both.unbind(1)
    elif layout == "heads_first":
        both = torch.cat([k, v], dim=-1).transpose(1, 2).contiguous()
        k, v = both.transpose(1, 2).split(shape.head_dim, dim=-1)
    num_tokens = int(made.batch.query_start_loc[-1])
    q = torch.randn(num_tokens, shape.num_q_heads, shape.head_dim, generator=rng).to(dtype)
    return AttentionCase(shape, made.batch, q, k, v, made.rows)
