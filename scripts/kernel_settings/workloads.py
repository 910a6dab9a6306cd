"""Batches over a paged KV cache: laid out anywhere in it, and those that settings are timed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Final

import torch
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, PagedBatch

NOWHERE: Final = 2**30
"""In a block table behind a request's own blocks, which no kernel may read."""
_NUM_SPARE_BLOCKS: Final = 5
_HEADS: Final = {64: (32, 8), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
"""(query heads, KV heads) by head size: Llama 3.2 1B, Phi-3 mini, Llama 3 8B, Gemma 2 9B."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that share a prefix of whole blocks; a single one shares nothing."""

    num_prefix_tokens: int
    members: tuple[tuple[int, int], ...]
    """(tokens of context between the prefix and the query, query tokens) of each."""


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Requests of some groups in one batch."""

    batch: PagedBatch
    """On the CPU."""
    written: Tensor
    """[num_blocks, block_size] bool: places of the cache that some request's tokens lie in."""
    rows: tuple[tuple[int, ...], ...]
    """The batch's rows of each group, ascending."""


def num_blocks(groups: Sequence[Group], block_size: int) -> int:
    """Blocks of a cache that has room for the groups, and some more."""
    own = (-(-(prior + query) // block_size) for group in groups for prior, query in group.members)
    prefixes = (group.num_prefix_tokens // block_size for group in groups)
    return sum(prefixes) + sum(own) + _NUM_SPARE_BLOCKS


def lay_out(
    groups: Sequence[Group],
    block_size: int,
    rng: torch.Generator,
    *,
    cache_blocks: int | None = None,
    order: Sequence[int] | None = None,
    num_padding: int = 0,
) -> LaidOut:
    """The groups' requests as a batch, their blocks scattered over a cache of `cache_blocks` (by
    default as many as they need), by a generator on the CPU.

    `order` is that of the members, numbered group by group, among the batch's rows; random by
    default. Behind them come rows of padding, without query tokens.
    """
    requests = [
        (idx, group.num_prefix_tokens + prior + query, query)
        for idx, group in enumerate(groups)
        for prior, query in group.members
    ]
    if order is None:
        order = torch.randperm(len(requests), generator=rng).tolist()
    requests = [requests[at] for at in order]
    cache_blocks = cache_blocks or num_blocks(groups, block_size)
    free = iter(torch.randperm(cache_blocks, generator=rng).tolist())
    prefixes = [list(islice(free, group.num_prefix_tokens // block_size)) for group in groups]
    lens = [length for _, length, _ in requests] + [0] * num_padding
    query_lens = [query for _, _, query in requests] + [0] * num_padding
    width = -(-max(lens, default=0) // block_size) + 2
    table = torch.full((len(lens), width), NOWHERE, dtype=torch.int32)
    written = torch.zeros(cache_blocks, block_size, dtype=torch.bool)
    rows: list[list[int]] = [[] for _ in groups]
    for row, (idx, length, _) in enumerate(requests):
        shared = prefixes[idx]
        own = islice(free, -(-length // block_size) - len(shared))
        blocks = torch.tensor([*shared, *own])
        table[row, : len(blocks)] = blocks
        where = torch.arange(length)
        written[blocks[where // block_size], where % block_size] = True
        rows[idx].append(row)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = PagedBatch(starts, torch.tensor(lens, dtype=torch.int32), table)
    return LaidOut(batch, written, tuple(map(tuple, rows)))


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's requests, to be timed."""

    name: str
    groups: tuple[Group, ...]

    @property
    def shares_nothing(self) -> bool:
        """Whether no two requests have a prefix in common."""
        return all(len(group.members) == 1 for group in self.groups)

    @property
    def num_requests(self) -> int:
        return sum(len(group.members) for group in self.groups)

    @property
    def num_query_tokens(self) -> int:
        return sum(query for group in self.groups for _, query in group.members)


def shape_for(head_dim: int, kv_bits: int) -> AttentionShape:
    """Heads of a well-known model with this head size."""
    return AttentionShape(*_HEADS[head_dim], head_dim, block_size=16, kv_bits=kv_bits)


def decoding(num_requests: int, degree: int, num_prefix_tokens: int, own: int = 256) -> Workload:
    """Decoding requests in groups of `degree`."""
    name = f"decode {num_requests}, degree {degree}, prefix {num_prefix_tokens}, own {own}"
    group = Group(num_prefix_tokens, ((own, 1),) * degree)
    return Workload(name, (group,) * (num_requests // degree))


def gate_workloads() -> dict[tuple[int, int], Workload]:
    """By (degree, prefix tokens): 128 decoding requests in groups of that degree."""
    prefixes = (64, 128, 256, 512, 1024, 2048, 4096)
    return {key: decoding(128, *key) for key in product((2, 4, 8, 16, 32), prefixes)}


def workloads_of(step: str) -> list[Workload]:
    """Those that a step of the search times.

    `launch`, for tilings: decode of 256 and 32, and decode beside prefill. `split`, for the split
    rule: few or uneven contexts, and enough equal ones. `gate`: see `gate_workloads`.
    """
    if step == "gate":
        return list(gate_workloads().values())
    if step == "split":
        uneven = (Group(0, ((16384, 1),)), *(Group(0, ((512, 1),)),) * 31)
        return [
            decoding(2, 1, 0, own=16384),
            decoding(8, 1, 0, own=4096),
            decoding(32, 32, 4096),
            decoding(32, 1, 2048),
            decoding(256, 1, 512),
            decoding(256, 16, 2048),
            Workload("decode 32, one of 16384", uneven),
        ]
    prefills = (Group(0, ((0, 1024),)), Group(512, ((0, 512),)), Group(2048, ((64, 256),)))
    decodes = (Group(1024, ((256, 1),) * 16),) * 4
    return [
        *(
            decoding(num_requests, degree, prefix)
            for num_requests in (256, 32)
            for prefix in (0, 512, 2048)
            for degree in ((1, 4, 16, num_requests) if prefix else (1,))
        ),
        Workload("decode 64 beside prefill 1792", (*decodes, *prefills)),
    ]


CHECKED: Final = Workload(
    "check",
    (
        Group(512, ((37, 1),) * 20), Group(2048, ((0, 1),) * 4), Group(64, ((15, 3),) * 3),
        Group(16, ((1, 1),) * 2), Group(0, ((0, 1),)), Group(0, ((63, 1),)),
        Group(0, ((3000, 1),)), Group(0, ((0, 111),)), Group(48, ((80, 65),)),
    ),
)  # fmt: skip
"""All cases: prefixes, chunks, awkward lengths, a context that is split."""
