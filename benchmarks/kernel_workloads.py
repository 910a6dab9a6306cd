"""Steps to measure attention on: the settings of the paper's Fig. 8 and more.

Blocks lie anywhere in the cache. The members of a group lie anywhere among the rows, or next to
each other: then a kernel that knows nothing of groups may find a prefix in the L2 cache, where the
member before has left it. Random values are drawn for each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from batchllm_kernels.prefix_attention import AttentionShape, PagedBatch, SharedPrefix

CacheLayout = Literal["separate", "interleaved", "packed"]
_NUM_SPARE_BLOCKS = 8
_NOWHERE = 2**30  # in a block table, which no kernel may read
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Family:
    """How many requests of a step prefill, and how many decode."""

    name: str
    num_prefill: int
    num_decode: int
    chunk_size: int = 1
    """Query tokens of a prefill, at most its own part."""

    @property
    def num_requests(self) -> int:
        return self.num_prefill + self.num_decode


DECODE_32 = Family("decode_32", 0, 32)
DECODE_256 = Family("decode_256", 0, 256)
MIXED = Family("mixed_7_256", 7, 256, chunk_size=256)  # 2,048 tokens, the paper's step
FAMILIES = (DECODE_32, DECODE_256, MIXED)


@dataclass(frozen=True, slots=True)
class Setting:
    """A step, up to what is random. Lengths are in tokens."""

    family: Family
    prefix: int
    own: int
    degree: int | None
    """Requests of a group; None: all share one prefix, 1: nothing is shared."""
    ragged: bool = False
    """Whether own parts end anywhere in their last block."""
    adjacent: bool = False
    """Whether the members of a group are neighbours in the batch."""

    @property
    def name(self) -> str:
        """As in the paper: prefix/own/degree, behind the family; "adjacent" at the end."""
        end = "/adjacent" if self.adjacent else ""
        return f"{self.family.name}/{self.prefix}/{self.own}/{self.degree or 'all'}{end}"

    @property
    def group_size(self) -> int:
        return self.degree or self.family.num_requests


def settings(*, quick: bool = False, adjacent: bool = False) -> list[Setting]:
    """What is measured, by family, prefix, own part and degree.

    Args:
        quick: one prefix and one own part.
        adjacent: also settings with adjacent members, one if quick. Others than these have only
            one order: nothing is shared, or everybody shares.
    """
    prefixes = (1024,) if quick else (128, 512, 1024, 2048, 4096)
    owns = (256,) if quick else (128, 256, 2048)
    shuffled = [
        Setting(family, prefix, own, degree)
        for family in FAMILIES
        for prefix in prefixes
        for own in owns
        for degree in (1, 4, 16, 64, None)
        if (degree or 0) < family.num_requests
    ]
    if not adjacent:
        return shuffled
    if quick:
        return [*shuffled, Setting(DECODE_256, 1024, 256, 16, adjacent=True)]
    return [
        *shuffled,
        *(replace(each, adjacent=True) for each in shuffled if each.degree not in (1, None)),
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's requests on a device, and what shares what."""

    setting: Setting
    shape: AttentionShape
    batch: PagedBatch
    """Entries of the block table behind a request's own are block 0, as vLLM has it."""
    query_lens: list[int]
    seq_lens: list[int]
    prefixes: list[SharedPrefix]
    num_blocks: int
    written: Tensor
    """[num_blocks, block_size]: slots that some request's tokens lie in."""

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def with_poisoned_table(self) -> PagedBatch:
        """The batch with block-table entries that lead nowhere behind each request's own."""
        table = self.batch.block_table
        blocks = torch.arange(table.shape[1], device=table.device)
        ends = (self.batch.seq_lens + self.shape.block_size - 1) // self.shape.block_size
        poisoned = table.masked_fill(blocks >= ends[:, None], _NOWHERE)
        return PagedBatch(self.batch.query_start_loc, self.batch.seq_lens, poisoned)


def lengths(setting: Setting, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Query and context lengths of a step's rows: prefills anywhere among the others."""
    family = setting.family
    query_lens, seq_lens = [], []
    chunk = min(family.chunk_size, setting.own)
    chunks = np.array([chunk] * family.num_prefill + [1] * family.num_decode)
    for query_len in rng.permutation(chunks).tolist():
        cut = int(rng.integers(16)) if setting.ragged else 0
        own = max(setting.own - cut, query_len)
        query_lens.append(query_len)
        seq_lens.append(setting.prefix + own)
    return query_lens, seq_lens


def groups(setting: Setting, rng: np.random.Generator) -> list[SharedPrefix]:
    """Which rows share a prefix: any, or neighbours; the last group may be smaller than others."""
    num_rows = setting.family.num_requests
    rows = np.arange(num_rows) if setting.adjacent else rng.permutation(num_rows)
    size = setting.group_size
    members = [sorted(rows[at : at + size].tolist()) for at in range(0, len(rows), size)]
    return [SharedPrefix(tuple(each), setting.prefix) for each in members]


def make_step(
    setting: Setting, shape: AttentionShape, rng: np.random.Generator, device: torch.device
) -> Step:
    """A step of this setting, its blocks scattered over the cache."""
    query_lens, seq_lens = lengths(setting, rng)
    all_groups = groups(setting, rng)
    size = shape.block_size
    num_shared = setting.prefix // size
    num_blocks_of = [-(-length // size) for length in seq_lens]
    num_own = sum(num_blocks_of) - num_shared * len(seq_lens)
    num_blocks = num_own + num_shared * len(all_groups) + _NUM_SPARE_BLOCKS
    free: Iterator[int] = iter(rng.permutation(num_blocks).tolist())
    table = np.zeros((len(seq_lens), max(num_blocks_of)), dtype=np.int32)
    written = np.zeros((num_blocks, size), dtype=bool)
    for group in all_groups:
        shared = [next(free) for _ in range(num_shared)]
        for row in group.requests:
            own = [next(free) for _ in range(num_blocks_of[row] - num_shared)]
            table[row, : num_blocks_of[row]] = shared + own
            where = np.arange(seq_lens[row])
            written[table[row, where // size], where % size] = True
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return Step(
        setting,
        shape,
        PagedBatch(
            torch.from_numpy(starts).to(device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            torch.from_numpy(table).to(device),
        ),
        query_lens,
        seq_lens,
        [group for group in all_groups if len(group.requests) > 1],
        num_blocks,
        torch.from_numpy(written).to(device),
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer attends with. Several of them keep a cache from holding one's keys."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor


def make_layer(step: Step, dtype: torch.dtype, layout: CacheLayout, *, poisoned: bool) -> Layer:
    """Fresh random queries, keys and values; NaN in `out`.

    Args:
        step: whose batch.
        dtype: of everything.
        layout: of the cache. "separate" tensors, "interleaved" ([num_blocks, 2, ...]), or
            "packed": the keys and values of a head side by side.
        poisoned: whether unwritten slots hold NaN instead of leftovers.
    """
    shape, device = step.shape, step.written.device
    size, num_heads, head_dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    if layout == "separate":
        both = torch.empty(
            2, step.num_blocks, size, num_heads, head_dim, dtype=dtype, device=device
        )
        k_cache, v_cache = both.unbind(0)
    elif layout == "interleaved":
        both = torch.empty(
            step.num_blocks, 2, size, num_heads, head_dim, dtype=dtype, device=device
        )
        k_cache, v_cache = both.unbind(1)
    else:
        both = torch.empty(
            step.num_blocks, size, num_heads, 2 * head_dim, dtype=dtype, device=device
        )
        k_cache, v_cache = both.split(head_dim, dim=-1)
    both.normal_()
    if poisoned:
        k_cache[~step.written] = NAN
        v_cache[~step.written] = NAN
    q = torch.randn(step.num_tokens, shape.num_q_heads, head_dim, device=device).to(dtype)
    return Layer(q, k_cache, v_cache, torch.full_like(q, NAN))
