"""Lays out a step's work on the device, in buffers of a `Scheduler`."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import triton
from torch import Tensor

from batchllm_kernels.prefix_attention.batch import AttentionShape, BatchLimits, PagedBatch
from batchllm_kernels.prefix_attention.config import ArchConfig, LaunchConfig
from batchllm_kernels.prefix_attention.device.grouping import (
    find_depths,
    find_leaders,
    measure_groups,
)
from batchllm_kernels.prefix_attention.device.layout import lay_out
from batchllm_kernels.prefix_attention.grouping import MAX_GATED_DEGREE
from batchllm_kernels.prefix_attention.tiles import HEADER_FIELDS, MEMBER_FIELDS, TILE_FIELDS

PIECE_ALIGN = 128
"""Pieces of a context end at multiples of this many tokens."""
CHUNK = 1024
"""Requests that a program of `lay_out` reads at a time."""
MIN_MOST_PIECES = 8
"""Most pieces of a context, if the device has fewer programs; else one per program."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The attention kernel's work; `tiles.py` describes the records.

    It is in its scheduler's buffers: the next `Scheduler.build` overwrites it. Addresses don't
    change, so a captured graph can be replayed after a new build.
    """

    shape: AttentionShape
    arch: str
    launch: LaunchConfig
    merge_in_launch: bool
    block_table: Tensor
    header: Tensor
    """[HEADER_FIELDS] int32."""
    tiles: Tensor
    """[max_tiles, TILE_FIELDS] int32."""
    members: Tensor
    """[max_num_requests, MEMBER_FIELDS] int32."""
    counters: Tensor
    """[num_counters, num_kv_heads] int32: zero between launches."""
    partial_out: Tensor
    """[max_slots, num_q_heads, head_dim] float32."""
    partial_lse: Tensor
    """[max_slots, num_q_heads] float32, to the base 2."""
    max_programs: int
    """Most persistent programs with work."""


@dataclass(frozen=True)
class Partials:
    """Scratch memory, used within one launch."""

    out: Tensor
    """[max_slots, num_q_heads, head_dim] float32."""
    lse: Tensor
    """[max_slots, num_q_heads] float32, to the base 2."""


_partials: WeakValueDictionary[tuple[torch.device, int, int], Partials] = WeakValueDictionary()


def partials_for(num_slots: int, shape: AttentionShape, device: torch.device) -> Partials:
    """Scratch memory shared by all schedulers with equal heads on a device.

    Their launches follow each other on one stream, so no two use it at once. Earlier schedulers
    keep theirs when a later one needs more.
    """
    key = (device, shape.num_q_heads, shape.head_dim)
    found = _partials.get(key)
    if found is None or len(found.out) < num_slots:
        size = (num_slots, shape.num_q_heads)
        out = torch.empty(*size, shape.head_dim, device=device)
        found = _partials[key] = Partials(out, torch.empty(*size, device=device))
    return found


@dataclass(frozen=True, slots=True)
class Capacity:
    """Upper bounds for any batch within the limits.

    Let W be the keys of all row tiles, prefixes once. With pieces of at least W / target_pieces
    tokens, cutting adds at most target_pieces tiles, and the pieces of a cut part cover less than
    twice its length.
    """

    tiles: int
    slots: int
    counters: int

    @classmethod
    def of(
        cls, limits: BatchLimits, wide_tokens: int, member_tokens: int, target_pieces: int
    ) -> Capacity:
        """From the most query tokens of a wide tile and of a group's member."""
        requests = limits.max_num_requests
        row_tiles = requests + limits.max_num_tokens // wide_tokens
        stacked = requests * member_tokens
        return cls(
            tiles=row_tiles + requests + target_pieces,
            slots=stacked
            + min(stacked, limits.max_num_tokens)
            + 2 * wide_tokens * (target_pieces + 1),
            counters=requests + target_pieces + 1,
        )


def num_processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 1 for Triton's interpreter."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Scheduler:
    """Groups a step's requests and cuts its work into tiles, on the device.

    Args:
        shape: heads and blocks.
        limits: upper bounds of all batches.
        config: the architecture's settings.
        device: for all buffers, which are allocated here.
    """

    def __init__(
        self, shape: AttentionShape, limits: BatchLimits, config: ArchConfig, device: torch.device
    ) -> None:
        launch = config.launch_config(shape.head_dim, shape.kv_bits)
        self._shape, self._limits, self._config, self._launch = shape, limits, config, launch
        self._narrow_tokens = tile_tokens(launch.narrow.block_m, shape.heads_per_kv)
        self.wide_tokens = tile_tokens(launch.wide.block_m, shape.heads_per_kv)
        self.max_member_tokens = min(config.gate.max_member_tokens, self.wide_tokens)
        self.max_programs = num_processors(device) * launch.programs_per_processor
        pieces = self.max_programs * config.split.pieces_per_program
        self._target_pieces = max(1, pieces // shape.num_kv_heads)
        self._max_pieces = max(MIN_MOST_PIECES, -(-self.max_programs // shape.num_kv_heads))
        self.capacity = Capacity.of(
            limits, self.wide_tokens, self.max_member_tokens, self._target_pieces
        )

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        requests = limits.max_num_requests
        self._padded_requests = triton.next_power_of_2(max(requests, 16))
        self._depths, self._leaders, self._final_leaders = (ints(requests) for _ in range(3))
        self._prefix_lens, self._ranks, self._degrees = (ints(requests) for _ in range(3))
        self._min_prefix = ints(MAX_GATED_DEGREE + 1)
        self._min_prefix.copy_(torch.tensor(config.gate.min_prefix_by_degree()))
        self._header = ints(HEADER_FIELDS)
        self._tiles = ints(self.capacity.tiles, TILE_FIELDS)
        self._members = ints(requests, MEMBER_FIELDS)
        self._counters = ints(self.capacity.counters, shape.num_kv_heads)
        self._partials = partials_for(self.capacity.slots, shape, device)

    def build(self, batch: PagedBatch) -> Schedule:
        """Lay out a step by four small launches, without waiting for them.

        Overwrites the previous schedule.
        """
        num_requests = batch.num_requests
        if num_requests == 0:
            self._header.zero_()
            return self._schedule(batch)
        table_stride = batch.block_table.stride(0)
        num_probes = batch.block_table.shape[1].bit_length()
        sizes = {
            "MAX_DEGREE": MAX_GATED_DEGREE,
            "WIDE_TOKENS": self.wide_tokens,
            "BLOCK_SIZE": self._shape.block_size,
            "REQUESTS": self._padded_requests,
        }
        grid = (num_requests,)
        find_depths[grid](
            batch.query_start_loc, batch.seq_lens, batch.block_table, self._min_prefix,
            self._depths, table_stride, num_requests, self.max_member_tokens, num_probes, **sizes,
        )  # fmt: skip
        find_leaders[grid](
            batch.query_start_loc, batch.block_table, self._depths, self._leaders,
            table_stride, num_requests, REQUESTS=self._padded_requests, BLOCKS=128,
        )  # fmt: skip
        measure_groups[grid](
            batch.query_start_loc, self._depths, self._leaders, self._min_prefix,
            self._final_leaders, self._prefix_lens, self._ranks, self._degrees, num_requests,
            **sizes,
        )  # fmt: skip
        lay_out[grid](
            batch.query_start_loc, batch.seq_lens, self._final_leaders, self._prefix_lens,
            self._ranks, self._degrees, self._header, self._tiles, self._members,
            num_requests, self._config.split.min_tokens, self._target_pieces, self._max_pieces,
            self._limits.max_num_requests,
            PIECE_ALIGN=PIECE_ALIGN, NARROW_TOKENS=self._narrow_tokens,
            WIDE_TOKENS=self.wide_tokens, CHUNK=min(self._padded_requests, CHUNK),
        )  # fmt: skip
        return self._schedule(batch)

    def _schedule(self, batch: PagedBatch) -> Schedule:
        return Schedule(
            self._shape,
            self._config.arch,
            self._launch,
            self._config.merge_in_launch,
            batch.block_table,
            self._header,
            self._tiles,
            self._members,
            self._counters,
            self._partials.out,
            self._partials.lse,
            self.max_programs,
        )


def tile_tokens(block_m: int, heads_per_kv: int) -> int:
    """Query tokens that fit in a tile's rows."""
    return max(1, block_m // heads_per_kv)
