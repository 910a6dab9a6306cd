"""Steps to measure attention on: the settings of the paper's Fig. 8 and more.

Blocks lie anywhere in the cache. The members of a group lie anywhere among the rows, or next to
each other: then a kernel that knows nothing of groups may find a prefix in the L2 cache, where the
member before has left it. Random values are drawn for each step.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from kernel_settings.workloads import NOWHERE, Group, lay_out
from torch import Tensor

from batchllm_kernels.prefix_attention import AttentionShape, PagedBatch, SharedPrefix

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


def groups(setting: Setting, rng: np.random.Generator) -> list[Group]:
    """A step's groups, prefills in any of them; the last may be smaller than others."""
    family, size = setting.family, setting.group_size
    chunk = min(family.chunk_size, setting.own)
    chunks = np.array([chunk] * family.num_prefill + [1] * family.num_decode)
    members = []
    for query in rng.permutation(chunks).tolist():
        cut = int(rng.integers(16)) if setting.ragged else 0
        members.append((max(setting.own - cut, query) - query, query))
    return [
        Group(setting.prefix, tuple(members[at : at + size])) for at in range(0, len(members), size)
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's requests on a device, and what shares what."""

    shape: AttentionShape
    groups: list[Group]
    poisoned: PagedBatch
    """Entries of the block table behind a request's own lead nowhere."""
    batch: PagedBatch
    """The same with block 0 there, as vLLM has it."""
    prefixes: list[SharedPrefix]
    written: Tensor
    """[num_blocks, block_size]: slots that some request's tokens lie in."""

    @property
    def query_lens(self) -> list[int]:
        return [int(length) for length in self.batch.query_start_loc.diff()]

    @property
    def seq_lens(self) -> list[int]:
        return [int(length) for length in self.batch.seq_lens]


def make_step(
    setting: Setting, shape: AttentionShape, rng: np.random.Generator, device: torch.device
) -> Step:
    """A step of this setting, its blocks scattered over the cache."""
    all_groups = groups(setting, rng)
    torch_rng = torch.Generator().manual_seed(int(rng.integers(2**31)))
    order = range(setting.family.num_requests) if setting.adjacent else None
    made = lay_out(all_groups, shape.block_size, torch_rng, order=order)
    tensors = (made.batch.query_start_loc, made.batch.seq_lens, made.batch.block_table)
    starts, lens, table = (tensor.to(device) for tensor in tensors)
    return Step(
        shape,
        all_groups,
        PagedBatch(starts, lens, table),
        PagedBatch(starts, lens, table.masked_fill(table == NOWHERE, 0)),
        [SharedPrefix(rows, setting.prefix) for rows in made.rows if len(rows) > 1],
        made.written.to(device),
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer attends with. Several of them keep a cache from holding one's keys."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor


def make_layer(step: Step, dtype: torch.dtype, *, poisoned: bool) -> Layer:
    """Fresh random queries, keys and values, side by side as vLLM has them; NaN in `out`.

    Args:
        step: whose batch.
        dtype: of everything.
        poisoned: whether unwritten slots hold NaN instead of leftovers.
    """
    shape, device, head_dim = step.shape, step.written.device, step.shape.head_dim
    num_blocks, size = step.written.shape
    heads = shape.num_kv_heads
    both = torch.randn(num_blocks, size, heads, 2 * head_dim, dtype=dtype, device=device)
    k_cache, v_cache = both.split(head_dim, dim=-1)
    if poisoned:
        k_cache[~step.written] = NAN
        v_cache[~step.written] = NAN
    num_tokens = int(step.batch.query_start_loc[-1])
    q = torch.randn(num_tokens, shape.num_q_heads, head_dim, device=device).to(dtype)
    return Layer(q, k_cache, v_cache, torch.full_like(q, NAN))
