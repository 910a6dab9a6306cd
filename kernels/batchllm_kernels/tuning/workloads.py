"""Batches to time and check settings, over one paged KV cache of random data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, PagedBatch

BLOCK_SIZE: Final = 16
TABLE_ALIGN: Final = 16
"""Rows of block tables are multiples of this: Triton specialises kernels for others."""
_HEADS: Final = {64: (32, 8), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
"""(query heads, KV heads) by head size: Llama 3.2 1B, Phi-3 mini, Llama 3 8B, Gemma 2 9B."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with one prefix. Lengths are in tokens."""

    num_requests: int
    num_prefix_tokens: int
    num_own_tokens: int
    """Context between the prefix and the query."""
    num_query_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's requests."""

    name: str
    groups: tuple[Group, ...]

    @property
    def shares_nothing(self) -> bool:
        """Whether no two requests have a prefix in common."""
        return all(group.num_requests == 1 for group in self.groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return sum(
            group.num_prefix_tokens // BLOCK_SIZE + group.num_requests * _own_blocks(group)
            for group in self.groups
        )

    @property
    def num_requests(self) -> int:
        """Requests of all groups."""
        return sum(group.num_requests for group in self.groups)

    @property
    def num_query_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(group.num_requests * group.num_query_tokens for group in self.groups)


def shape_for(head_dim: int, kv_bits: int) -> AttentionShape:
    """Heads of a well-known model with this head size."""
    return AttentionShape(*_HEADS[head_dim], head_dim, BLOCK_SIZE, kv_bits)


def decoding(num_requests: int, degree: int, num_prefix_tokens: int, own: int = 256) -> Workload:
    """Decoding requests in groups of `degree`."""
    name = f"decode {num_requests}, degree {degree}, prefix {num_prefix_tokens}"
    groups = (Group(degree, num_prefix_tokens, own),) * (num_requests // degree)
    return Workload(name, groups)


def launch_workloads() -> list[Workload]:
    """Workloads for tilings: decode of 256 and 32, and decode beside prefill."""
    batches = []
    for num_requests in (256, 32):
        batches.append(decoding(num_requests, 1, 0))
        batches += [
            decoding(num_requests, degree, prefix)
            for prefix in (512, 2048)
            for degree in (1, 4, 16, num_requests)
        ]
    prefills = (Group(1, 0, 0, 1024), Group(1, 512, 0, 512), Group(1, 2048, 64, 256))
    mixed = Workload("decode 64 beside prefill 1792", (Group(16, 1024, 256),) * 4 + prefills)
    return [*batches, mixed]


def split_workloads() -> list[Workload]:
    """Workloads for the split rule: few or uneven contexts, and enough equal ones."""
    uneven = (Group(1, 0, 16384), *(Group(1, 0, 512),) * 31)
    return [
        decoding(2, 1, 0, own=16384),
        decoding(8, 1, 0, own=4096),
        decoding(32, 32, 4096),
        decoding(32, 1, 2048),
        decoding(256, 1, 512),
        decoding(256, 16, 2048),
        Workload("decode 32, one of 16384", uneven),
    ]


def gate_workload(degree: int, num_prefix_tokens: int) -> Workload:
    """A workload for the gate: 128 decoding requests in groups of `degree`."""
    return decoding(128, degree, num_prefix_tokens)


def check_workload() -> Workload:
    """A small workload with all cases: prefixes, chunks, awkward lengths, a split context."""
    groups = (
        Group(20, 512, 37), Group(4, 2048, 0), Group(3, 64, 15, 3), Group(2, 16, 1),
        Group(1, 0, 0), Group(1, 0, 63), Group(1, 0, 3000), Group(1, 0, 0, 111),
        Group(1, 48, 80, 65),
    )  # fmt: skip
    return Workload("check", groups)


def lay_out(
    workload: Workload, num_blocks: int, table_blocks: int, rng: torch.Generator
) -> PagedBatch:
    """The workload's requests in random order, their blocks scattered over `num_blocks`.

    Args:
        workload: its prefixes must be whole blocks.
        num_blocks: blocks of the cache.
        table_blocks: length of a block table's row; unused entries are invalid.
        rng: on the CPU, like the batch.
    """
    free = iter(torch.randperm(num_blocks, generator=rng).tolist())
    rows: list[tuple[list[int], int, int]] = []
    for group in workload.groups:
        prefix = [next(free) for _ in range(group.num_prefix_tokens // BLOCK_SIZE)]
        length = group.num_prefix_tokens + group.num_own_tokens + group.num_query_tokens
        for _ in range(group.num_requests):
            own = [next(free) for _ in range(_own_blocks(group))]
            rows.append((prefix + own, length, group.num_query_tokens))
    table = torch.full((len(rows), table_blocks), 2**30, dtype=torch.int32)
    order = torch.randperm(len(rows), generator=rng).tolist()
    for row, idx in enumerate(order):
        blocks = rows[idx][0]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    starts = torch.tensor([0] + [rows[idx][2] for idx in order]).cumsum(0).int()
    seq_lens = torch.tensor([rows[idx][1] for idx in order], dtype=torch.int32)
    return PagedBatch(starts, seq_lens, table)


def table_blocks_for(workloads: Sequence[Workload]) -> int:
    """Blocks of the longest context, rounded up to a multiple of `TABLE_ALIGN`."""
    longest = max(
        group.num_prefix_tokens // BLOCK_SIZE + _own_blocks(group)
        for workload in workloads
        for group in workload.groups
    )
    return -(-longest // TABLE_ALIGN) * TABLE_ALIGN


def unwritten(batch: PagedBatch, num_blocks: int) -> Tensor:
    """[num_blocks, BLOCK_SIZE] bool: places of the cache outside of all contexts."""
    empty = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for row, length in zip(batch.block_table, batch.seq_lens.tolist(), strict=True):
        where = torch.arange(length)
        empty[row[where // BLOCK_SIZE].long(), where % BLOCK_SIZE] = False
    return empty


def _own_blocks(group: Group) -> int:
    return -(-(group.num_own_tokens + group.num_query_tokens) // BLOCK_SIZE)
