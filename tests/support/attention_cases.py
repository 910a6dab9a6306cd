"""Random batches over a paged KV cache, with NaN wherever no request may read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention import AttentionShape, PagedBatch

NAN = float("nan")


@dataclass(frozen=True)
class Group:
    """Requests that share a prefix: (own context tokens, query tokens) of each.

    Own context is what lies between the prefix and the query tokens.
    """

    num_prefix_tokens: int
    members: tuple[tuple[int, int], ...]


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
    size = shape.block_size
    requests = [
        (group_idx, own, query)
        for group_idx, group in enumerate(groups)
        for own, query in group.members
    ]
    order = torch.randperm(len(requests), generator=rng).tolist()
    requests = [requests[i] for i in order]
    lens = [groups[g].num_prefix_tokens + own + query for g, own, query in requests]
    max_blocks = max([-(-length // size) for length in lens], default=1) + 2
    needed = sum(g.num_prefix_tokens // size for g in groups)
    needed += sum(-(-n // size) - groups[g].num_prefix_tokens // size
                  for (g, _, _), n in zip(requests, lens, strict=True))  # fmt: skip
    num_blocks = needed + 5
    free = torch.randperm(num_blocks, generator=rng).tolist()
    prefix_blocks = [[free.pop() for _ in range(g.num_prefix_tokens // size)] for g in groups]
    # What lies behind a request's blocks is never looked up, so it may point anywhere.
    table = torch.full((len(requests) + num_padding, max_blocks), 2**30, dtype=torch.int32)
    written = torch.zeros(num_blocks, size, dtype=torch.bool)
    for row, ((g, _, _), length) in enumerate(zip(requests, lens, strict=True)):
        blocks = list(prefix_blocks[g])
        blocks += [free.pop() for _ in range(-(-length // size) - len(blocks))]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        where = torch.arange(length)
        written[table[row][where // size].long(), where % size] = True
    query_lens = [query for _, _, query in requests] + [0] * num_padding
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    batch = PagedBatch(starts, torch.tensor(lens + [0] * num_padding, dtype=torch.int32), table)

    def cache() -> Tensor:
        kv = torch.randn(num_blocks, size, shape.num_kv_heads, shape.head_dim, generator=rng)
        kv[~written] = NAN
        return kv.to(kv_dtype or dtype)

    k, v = cache(), cache()
    if layout == "interleaved":
        both = torch.stack([k, v], dim=1)
        k, v = both.unbind(1)
    elif layout == "heads_first":
        both = torch.cat([k, v], dim=-1).transpose(1, 2).contiguous()
        k, v = both.transpose(1, 2).split(shape.head_dim, dim=-1)
    num_tokens = int(starts[-1])
    q = torch.randn(num_tokens, shape.num_q_heads, shape.head_dim, generator=rng).to(dtype)
    rows: dict[int, list[int]] = {}
    for row, (g, _, _) in enumerate(requests):
        rows.setdefault(g, []).append(row)
    return AttentionCase(shape, batch, q, k, v, tuple(tuple(rows[g]) for g in sorted(rows)))
