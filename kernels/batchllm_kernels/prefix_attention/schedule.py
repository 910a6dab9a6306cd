"""Lays out a step's work on the device, in buffers that are allocated once."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import triton
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, BatchLimits, PagedBatch
from batchllm_kernels.prefix_attention.config import ArchConfig
from batchllm_kernels.prefix_attention.device.arguments import Sizes
from batchllm_kernels.prefix_attention.device.grouping import (
    find_depths,
    find_leaders,
    measure_groups,
)
from batchllm_kernels.prefix_attention.device.layout import lay_out
from batchllm_kernels.prefix_attention.device.tiles import (
    HEADER_FIELDS,
    MEMBER_FIELDS,
    TILE_FIELDS,
)
from batchllm_kernels.prefix_attention.grouping import MAX_GATED_DEGREE

MIN_MOST_PIECES = 8
"""Most pieces of a context, if the device has fewer programs; else one per program."""


_scratch: WeakValueDictionary[tuple[torch.device, int, int], Tensor] = WeakValueDictionary()


def scratch_for(num_slots: int, shape: AttentionShape, device: torch.device) -> Tensor:
    """Memory for the partials of one launch, [num_slots or more, num_q_heads * (head_dim + 1)].

    All schedules with equal heads on a device share it: their launches follow each other on one
    stream. Earlier ones keep theirs when a later one needs more.
    """
    key = (device, shape.num_q_heads, shape.head_dim)
    scratch = _scratch.get(key)
    if scratch is None or len(scratch) < num_slots:
        size = (num_slots, shape.num_q_heads * (shape.head_dim + 1))
        scratch = _scratch[key] = torch.empty(size, device=device)
    return scratch


class Capacity(NamedTuple):
    """Upper bounds for any batch within the limits.

    Let W be the keys of all row tiles, prefixes once. With pieces of at least W / target_pieces
    tokens, cutting adds at most target_pieces tiles, and the pieces of a cut part cover less than
    twice its length.
    """

    tiles: int
    slots: int
    counters: int


def num_processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 1 for Triton's interpreter."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def sizes_of(block_size: int, narrow_tokens: int, wide_tokens: int, requests: int) -> Sizes:
    """For steps of up to so many requests, a power of two."""
    chunk = min(requests, 1024)
    return Sizes(block_size, narrow_tokens, wide_tokens, MAX_GATED_DEGREE, requests, chunk)


class Schedule:
    """A step's work, grouped and cut into tiles on the device.

    All buffers are allocated here, for batches within the limits. Addresses don't change, so a
    captured graph can be replayed after a new `build`.

    Attributes:
        header: [HEADER_FIELDS] int32; `device/tiles.py` describes the records.
        tiles: [max_tiles, TILE_FIELDS] int32.
        members: [max_num_requests, MEMBER_FIELDS] int32.
        counters: [num_counters, num_kv_heads] int32: zero between launches.
        partial_out: [max_slots, num_q_heads, head_dim] float32.
        partial_lse: [max_slots, num_q_heads] float32, to the base 2.
        max_programs: most persistent programs with work.
    """

    def __init__(
        self, shape: AttentionShape, limits: BatchLimits, config: ArchConfig, device: torch.device
    ) -> None:
        self.shape, self.config, self._limits = shape, config, limits
        self.launch = launch = config.launch_config(shape.head_dim, shape.kv_bits)
        self.wide_tokens = tile_tokens(launch.wide.block_m, shape.heads_per_kv)
        self.max_member_tokens = min(config.gate.max_member_tokens, self.wide_tokens)
        self.max_programs = num_processors(device) * launch.programs_per_processor
        pieces = self.max_programs * config.split.pieces_per_program
        self._target_pieces = max(1, pieces // shape.num_kv_heads)
        self._max_pieces = max(MIN_MOST_PIECES, -(-self.max_programs // shape.num_kv_heads))
        requests, tokens = limits.max_num_requests, limits.max_num_tokens
        stacked = requests * self.max_member_tokens
        self.capacity = Capacity(
            tiles=2 * requests + tokens // self.wide_tokens + self._target_pieces,
            slots=stacked + min(stacked, tokens) + 2 * self.wide_tokens * (self._target_pieces + 1),
            counters=requests + self._target_pieces + 1,
        )

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        padded = triton.next_power_of_2(max(requests, 16))
        narrow_tokens = tile_tokens(launch.narrow.block_m, shape.heads_per_kv)
        tokens_of_tiles = narrow_tokens, self.wide_tokens
        self._sizes = sizes_of(shape.block_size, *tokens_of_tiles, padded)
        self._depths, self._leaders, self._final_leaders = (ints(requests) for _ in range(3))
        self._prefix_lens, self._ranks, self._degrees = (ints(requests) for _ in range(3))
        self._min_prefix = ints(MAX_GATED_DEGREE + 1)
        self._min_prefix.copy_(torch.tensor(config.gate.min_prefix_by_degree()))
        self.header = ints(HEADER_FIELDS.value)
        self.tiles = ints(self.capacity.tiles, TILE_FIELDS.value)
        self.members = ints(requests, MEMBER_FIELDS.value)
        self.counters = ints(self.capacity.counters, shape.num_kv_heads)
        self._scratch = scratch_for(self.capacity.slots, shape, device)
        flat, slots, heads = self._scratch.view(-1), len(self._scratch), shape.num_q_heads
        self.partial_out = flat[: slots * heads * shape.head_dim].view(slots, heads, -1)
        self.partial_lse = flat[slots * heads * shape.head_dim :].view(slots, heads)

    def build(self, batch: PagedBatch) -> None:
        """Lay out a step by four small launches, without waiting for them.

        Overwrites the step before.
        """
        num_requests = batch.num_requests
        if num_requests == 0:
            self.header.zero_()
            return
        table_stride = batch.block_table.stride(0)
        num_probes = batch.block_table.shape[1].bit_length()
        sizes = self._sizes
        grid = (num_requests,)
        find_depths[grid](
            batch.query_start_loc, batch.seq_lens, batch.block_table, self._min_prefix,
            self._depths, table_stride, num_requests, self.max_member_tokens, num_probes, sizes,
        )  # fmt: skip
        find_leaders[grid](
            batch.query_start_loc, batch.block_table, self._depths, self._leaders,
            table_stride, num_requests, sizes,
        )  # fmt: skip
        measure_groups[grid](
            batch.query_start_loc, self._depths, self._leaders, self._min_prefix,
            self._final_leaders, self._prefix_lens, self._ranks, self._degrees, num_requests,
            sizes,
        )  # fmt: skip
        lay_out[grid](
            batch.query_start_loc, batch.seq_lens, self._final_leaders, self._prefix_lens,
            self._ranks, self._degrees, self.header, self.tiles, self.members,
            num_requests, self.config.split.min_tokens, self._target_pieces, self._max_pieces,
            self._limits.max_num_requests, sizes,
        )  # fmt: skip


def tile_tokens(block_m: int, heads_per_kv: int) -> int:
    """Query tokens that fit in a tile's rows."""
    return max(1, block_m // heads_per_kv)
