"""Predicts when each replica of a chain has computed its part of a prefix.

Replica i of p computes chunk i of a split. In each layer it needs the KV of all tokens before its
chunk, gets it from replica i - 1, and sends it on together with its own (Cho et al., Sec. 4.1 and
4.3, Fig. 5 and 7). With q_i, r_i the seconds of its QKV projections and of the rest of a layer
(`ReplicaCost`), t_i those of the transfer to it, and layers from 0:

    start_i(l)   = done_i(l - 1)                            done_i(-1) = step overhead
    begin_i(l)   = max(ready_{i-1}(l), arrived_i(l - 1))    a hop carries a layer at a time
    arrived_i(l) = begin_i(l) + t_i                         t_i = latency + s_i * bytes / bandwidth
    ready_i(l)   = max(start_i(l) + q_i, arrived_i(l)) + copies_i
    done_i(l)    = ready_i(l) + r_i
    TTFT         = done_{p-1}(L - 1) + head

where s_i are the tokens before chunk i. If receives aren't posted ahead (`Link.prefetches`),
begin_i(l) isn't before start_i(l): only the QKV projections hide the transfer.

Each replica then lacks the KV after its chunk. That is passed back the same way, from the last
replica to the first, in the other direction of each hop, layer by layer while the chain still runs:
the last replica sends a layer once it has all of that layer's keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.runahead.planning.replica_cost import ReplicaCost

Split = tuple[int, ...]
"""Tokens of each replica's chunk, in the order of the chain: above 0, their sum is the prefix, and
each but the last is a multiple of the block size."""
Goal = Literal["first_token", "whole_prefix"]
"""The time that a split minimizes: until TTFT at the last replica, as in the paper, or until all
replicas have the whole prefix. With the first, earlier replicas may end after the last one."""

# Places in the constants of `Chain`, and rows of each chunk's times per layer.
_STEP, _HEAD, _PREFETCHES, _MASKED = 5, 6, 10, 11
_FIRST, _REST, _COPIES, _HOP, _BACK_HOP, _NUM_TIMES = range(6)


@dataclass(frozen=True, slots=True)
class Link:
    """A hop between two replicas, with the same rate in both directions at once.

    Raises:
        PlanError: a value isn't finite or is out of its range.
    """

    bytes_per_s: float
    """Rate that a transfer reaches, not that of the data sheet."""
    latency_s: float = 0.0
    """Latency of a message, which has one layer's KV."""
    prefetches: bool = True
    """Whether receives are posted ahead for all layers, instead of each when its layer starts."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise PlanError(f"link: bytes_per_s must be finite and above 0: {self.bytes_per_s}")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise PlanError(f"link: latency_s must be finite and not below 0: {self.latency_s}")


@dataclass(frozen=True, slots=True)
class ChainTimes:
    """Seconds from the common start of all replicas."""

    ttft_s: float
    """Until the last replica has the first token."""
    chunk_s: tuple[float, ...]
    """Until each replica has computed its chunk."""
    whole_s: tuple[float, ...]
    """Until each replica has computed its chunk and has the KV of the whole prefix."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A row of equal replicas and links.

    Raises:
        PlanError: a size is below 1, or a step holds less than a block.
    """

    cost: ReplicaCost
    link: Link
    block_size: int = 16
    """Tokens of a KV block."""
    max_step_tokens: int | None = None
    """Most tokens of an engine step; a chunk must fit into one."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise PlanError(f"chain: block_size must be at least 1, not {self.block_size}")
        if self.max_step_tokens is not None and self.max_step_tokens < self.block_size:
            raise PlanError(
                f"chain: a step of {self.max_step_tokens} tokens holds no block of"
                f" {self.block_size}; raise engine.max_num_batched_tokens"
            )

    @property
    def max_chunk_blocks(self) -> int | None:
        """Whole blocks of the longest chunk; None without a limit."""
        return None if self.max_step_tokens is None else self.max_step_tokens // self.block_size

    def check_length(self, num_tokens: int, num_replicas: int) -> None:
        """Refuse a prefix that can't be split.

        Raises:
            PlanError: it has fewer blocks than there are replicas, or more than they may compute
                in a step each.
        """
        if num_replicas < 1:
            raise PlanError(f"chain: it takes at least one replica, not {num_replicas}")
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks < num_replicas:
            raise PlanError(
                f"chain: a prefix of {num_tokens} tokens has fewer blocks of {self.block_size} than"
                f" there are replicas, {num_replicas}; use fewer"
            )
        most = self.max_chunk_blocks
        if most is not None and num_blocks > most * num_replicas:
            raise PlanError(
                f"chain: a chunk has to fit into one engine step, and {num_replicas} steps of"
                f" {self.max_step_tokens} tokens don't hold a prefix of {num_tokens}; raise"
                " engine.max_num_batched_tokens, or use more replicas"
            )

    def check_split(self, split: Sequence[int], num_tokens: int) -> None:
        """Refuse an invalid split of a prefix.

        Raises:
            PlanError: as `check_length`; or a chunk is empty, isn't whole blocks though others
                follow it, or is longer than a step; or the sum isn't the prefix.
        """
        self.check_length(num_tokens, len(split))
        if min(split) < 1 or sum(split) != num_tokens:
            raise PlanError(
                f"chain: chunks of {tuple(split)} tokens don't make up a prefix of {num_tokens}"
            )
        if any(chunk % self.block_size for chunk in split[:-1]):
            raise PlanError(
                f"chain: chunks of {tuple(split)} tokens aren't whole blocks of {self.block_size}"
            )
        if self.max_step_tokens is not None and max(split) > self.max_step_tokens:
            raise PlanError(
                f"chain: a chunk of {max(split)} tokens doesn't fit into a step of"
                f" {self.max_step_tokens}; raise engine.max_num_batched_tokens"
            )

    def seconds(self, splits: NDArray[np.int64], until: Goal) -> NDArray[np.float64]:
        """Seconds that each split takes: [num_splits, num_replicas] -> [num_splits].

        Empty or too long chunks take forever (inf); nothing else is checked.
        """
        found = _run(splits, *self._constants(), until == "whole_prefix")
        if until == "first_token":
            return found[:, 0]
        return np.asarray(found[:, 1 + splits.shape[1] :].max(axis=1), dtype=np.float64)

    def times(self, split: Sequence[int]) -> ChainTimes:
        """When each replica is done.

        Raises:
            PlanError: as `check_split`, for a prefix of the chunks' sum.
        """
        self.check_split(split, sum(split))
        row = _run(np.array([split], dtype=np.int64), *self._constants(), True)[0]
        chunk, whole = row[1 : 1 + len(split)], row[1 + len(split) :]
        return ChainTimes(float(row[0]), tuple(map(float, chunk)), tuple(map(float, whole)))

    def _constants(self) -> tuple[NDArray[np.float64], int, int]:
        cost, link = self.cost, self.link
        values = np.array(
            [
                cost.qkv_s_per_token,
                cost.other_s_per_token,
                cost.s_per_pair,
                cost.weights_s,
                cost.overhead_s,
                cost.step_overhead_s,
                cost.sampled_token_s,
                cost.kv_copy_s_per_token,
                cost.kv_bytes_per_token / link.bytes_per_s,
                link.latency_s,
                float(link.prefetches),
                float(cost.computes_masked_pairs),
            ]
        )
        return values, cost.num_layers, self.max_step_tokens or 2**62


@compiled
def _run(
    splits: NDArray[np.int64],
    constants: NDArray[np.float64],
    num_layers: int,
    max_chunk: int,
    passes_back: bool,
) -> NDArray[np.float64]:
    """The recurrence for each row of `splits`.

    Returns:
        [num_splits, 1 + 2 * num_replicas] seconds: TTFT; each chunk's end; each replica's whole
        prefix, if it `passes_back`.
    """
    step_s, head_s = constants[_STEP], constants[_HEAD]
    num, p = splits.shape
    found = np.full((num, 1 + 2 * p), np.inf)
    times = np.empty((_NUM_TIMES, p))
    ends = np.empty((2, p))
    for row in range(num):
        if splits[row].min() < 1 or splits[row].max() > max_chunk:
            continue
        _time_chunks(splits[row], constants, times)
        ends[0, :], ends[1, :] = step_s, 0.0
        _run_layers(times, num_layers, constants[_PREFETCHES] > 0, passes_back, ends)
        found[row, 0] = ends[0, p - 1] + head_s
        found[row, 1 : 1 + p] = ends[0]
        found[row, 1 + p :] = np.maximum(ends[0], ends[1])
    return found


@compiled
def _time_chunks(
    split: NDArray[np.int64], constants: NDArray[np.float64], times: NDArray[np.float64]
) -> None:
    """Seconds of one layer for each chunk: writes [_NUM_TIMES, num_replicas]."""
    qkv_s, other_s, pair_s, weights_s, least_s = constants[:5]
    copy_s, byte_s, latency_s = constants[7:10]
    masked = constants[_MASKED] > 0
    before, total = 0, split.sum()
    for i in range(len(split)):
        chunk = split[i]
        own = chunk if masked else (chunk + 1) / 2
        matrices_s = chunk * (qkv_s + other_s)
        slower = max(1.0, weights_s / matrices_s) if matrices_s > 0 else 1.0
        first = chunk * qkv_s * slower
        copies = before * copy_s
        times[_HOP, i] = latency_s + before * byte_s
        rest = chunk * other_s * slower + chunk * (before + own) * pair_s
        before += chunk
        if i < len(split) - 1:
            copies += before * copy_s
        times[_BACK_HOP, i] = latency_s + (total - before) * byte_s
        times[_FIRST, i], times[_COPIES, i] = first, copies
        times[_REST, i] = max(rest, least_s - first - copies)


@compiled
def _run_layers(
    times: NDArray[np.float64],
    num_layers: int,
    prefetches: bool,
    passes_back: bool,
    ends: NDArray[np.float64],
) -> None:
    """The recurrence over all layers, on [2, num_replicas]: chunks done, and KV passed back."""
    done, back = ends[0], ends[1]
    p = len(done)
    arrived, there = np.zeros(p), np.empty(p)
    for _ in range(num_layers):
        ready = 0.0
        for i in range(p):
            at = done[i] + times[_FIRST, i]
            if i > 0:
                begin = max(ready, arrived[i])
                if not prefetches:
                    begin = max(begin, done[i])
                arrived[i] = begin + times[_HOP, i]
                at = max(at, arrived[i])
            there[i] = at
            ready = at + times[_COPIES, i]
            done[i] = ready + times[_REST, i]
        if passes_back:
            for i in range(p - 2, -1, -1):
                from_next = there[i + 1]
                if i + 1 < p - 1:
                    from_next = max(from_next, back[i + 1])
                back[i] = max(from_next, back[i]) + times[_BACK_HOP, i]
