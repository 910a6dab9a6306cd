"""Predicts how long a chain of replicas takes to compute a prefix (ADR 23).

Replica i of p computes chunk i of a split. In each layer it projects its tokens, and broadcasts
their keys and values to all replicas; it attends once it has those of the chunks before. All
broadcasts go through one process group, layer by layer, and in a layer chunk by chunk. With q_i and
r_i, the seconds of the QKV projections and of the rest of a layer, and b_i, those of a broadcast:

    projected_i(l) = done_i(l - 1) + q_i                       done_i(-1) = 0
    begins_i(l)    = max(projected_i(l), sent_{i-1}(l))        begins_0(l) = projected_0(l)
    sent_i(l)      = max(projected_i(l), what was sent before) + b_i
    done_i(l)      = begins_i(l) + r_i
    seconds        = max(done_i(L - 1), sent_{p-1}(L - 1)) + the step's own time

After Cho et al., *KV-Runahead: Scalable Causal LLM Inference by Parallel Key-Value Cache
Generation* (ICML 2024, Sec. 4), in which each replica relays all KV to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.cost.gpu import GPU
from batchllm_operator.cost.model_shape import ModelShape
from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes.jit import compiled

Split = tuple[int, ...]
"""Tokens of each replica's chunk, in the order of the chain: above 0, their sum is the prefix, and
each but the last is a multiple of the block size."""


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """Seconds and bytes on one replica, of one layer unless noted.

    Prefilling c tokens after s others takes, in each layer, c tokens' matrices, or `weights_s` if
    that is longer, and attention over c * s + c * (c + 1) / 2 pairs.
    """

    num_layers: int
    qkv_s_per_token: float
    """For a token's query, key and value, which don't need the KV of earlier tokens."""
    other_s_per_token: float
    """For its other matrices: the attention's output and the MLP."""
    s_per_pair: float
    """For attention over all heads, of a token and one that it attends to."""
    kv_bytes_per_token: float
    weights_s: float = 0.0
    """To read the layer's weights: the least time of its matrices."""
    read_s_per_token: float = 0.0
    """To read the KV of one token, in decoding."""
    kv_copy_s_per_token: float = 0.0
    """To copy the KV of one token into or out of its block, around a transfer."""
    step_overhead_s: float = 0.0  # of a whole engine step
    sampled_token_s: float = 0.0  # for the head, per sampled token of a whole step

    @classmethod
    def of(cls, model: ModelShape, gpu: GPU) -> ReplicaCost:
        """A replica on one GPU, by the same roofline as `cost.roofline`."""
        qkv = model.hidden_size * model.head_size * (model.num_heads + 2 * model.num_kv_heads)
        kv_bytes = model.kv_bytes_per_token / model.num_layers
        return cls(
            num_layers=model.num_layers,
            qkv_s_per_token=2 * qkv / gpu.flop_per_s,
            other_s_per_token=2 * (model.num_layer_weights - qkv) / gpu.flop_per_s,
            s_per_pair=model.flop_per_pair / model.num_layers / gpu.flop_per_s,
            kv_bytes_per_token=kv_bytes,
            weights_s=model.num_layer_weights * model.bytes_per_weight / gpu.bytes_per_s,
            read_s_per_token=kv_bytes / gpu.bytes_per_s,
            kv_copy_s_per_token=2 * kv_bytes / gpu.bytes_per_s,
            step_overhead_s=gpu.step_overhead_s,
            sampled_token_s=model.flop_per_sampled_token / gpu.flop_per_s,
        )

    @property
    def s_per_token(self) -> float:
        """For all of a token's matrices."""
        return self.qkv_s_per_token + self.other_s_per_token

    def tokens_seconds(
        self, num_tokens: NDArray[np.float64], num_before: NDArray[np.float64] | float = 0.0
    ) -> NDArray[np.float64]:
        """Seconds of all layers for tokens after others, in steps that other requests fill too."""
        pairs = num_tokens * (num_before + (num_tokens + 1) / 2)
        return self.num_layers * (num_tokens * self.s_per_token + pairs * self.s_per_pair)

    def step_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of a step that prefills `num_tokens` after `num_before` cached ones."""
        layers_s = float(self.tokens_seconds(np.array(float(num_tokens)), float(num_before)))
        unfilled_s = max(self.weights_s - num_tokens * self.s_per_token, 0.0) * self.num_layers
        return layers_s + unfilled_s + self.step_overhead_s + self.sampled_token_s

    def calibrated(self, steps: Sequence[tuple[int, int, float]]) -> ReplicaCost:
        """The same with rates fitted to measured prefill steps.

        Fits seconds per step, token and pair, none below 0, by least squares on relative errors.
        QKV keeps its share of a token's matrices; reading the weights becomes part of the step.

        Args:
            steps: tokens of the chunk, tokens before it, and seconds above 0.

        Raises:
            PlanError: fewer than three steps of different sizes, or times that don't grow with
                tokens.
        """
        if len({(chunk, before) for chunk, before, _ in steps}) < 3:
            raise PlanError("cost of a replica: a fit takes three measured steps of different size")
        sizes = [[1.0, chunk, chunk * (before + (chunk + 1) / 2)] for chunk, before, _ in steps]
        seconds = np.array([seconds for *_, seconds in steps])
        step_s, token_s, pair_s = _fit_not_below_zero(np.array(sizes) / seconds[:, np.newaxis])
        if token_s <= 0:
            raise PlanError("cost of a replica: the measured steps don't grow with their tokens")
        qkv_share = self.qkv_s_per_token / self.s_per_token
        return replace(
            self,
            qkv_s_per_token=token_s * qkv_share / self.num_layers,
            other_s_per_token=token_s * (1 - qkv_share) / self.num_layers,
            s_per_pair=pair_s / self.num_layers,
            weights_s=0.0,
            step_overhead_s=step_s,
            sampled_token_s=0.0,
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """Equal replicas that compute prefixes together."""

    cost: ReplicaCost
    num_replicas: int
    link_bytes_per_s: float
    """Rate that a broadcast reaches, not that of the data sheet."""
    block_size: int = 16
    """Tokens of a KV block."""
    max_chunk_blocks: int = 1 << 40
    """Most blocks of a chunk, which has to fit into an engine step."""

    @property
    def longest_chunk(self) -> int:
        """Most tokens of a chunk."""
        return self.max_chunk_blocks * self.block_size

    def can_split(self, num_tokens: int) -> bool:
        """Whether each replica gets a block at least, and no more than fit into a step."""
        num_blocks = -(-num_tokens // self.block_size)
        return 1 <= num_blocks / self.num_replicas <= self.max_chunk_blocks

    def split(self, num_tokens: int) -> Split:
        """Chunks, of a prefix that `can_split`, that take equally long if no replica waits.

        Later tokens attend to more, so later chunks are shorter (Cho et al., Sec. 4.2). The tokens
        up to e take W(e) = a * e + b / 2 * e^2 in a layer, so each chunk ends where W has grown by
        its share of what is left.
        """
        b = self.cost.s_per_pair
        a = self.cost.s_per_token + b / 2

        def end_after(begin: int, left: int) -> float:
            work, whole = (a * end + b / 2 * end**2 for end in (begin, num_tokens))
            work += (whole - work) / left
            return 2 * work / (a + math.sqrt(a**2 + 2 * b * work))

        return self.split_at(end_after, num_tokens)

    def split_at(self, end_after: Callable[[int, int], float], num_tokens: int) -> Split:
        """The split whose chunks, except the last, end as near as possible to `end_after`.

        That says where a chunk ends, by the tokens before it and the number of chunks from it on.
        """
        size, most = self.block_size, self.max_chunk_blocks
        num_blocks = -(-num_tokens // size)
        bounds = [0]
        for left in range(self.num_replicas, 1, -1):
            begin = bounds[-1]
            least = max(begin + 1, num_blocks - (left - 1) * most)
            greatest = min(begin + most, num_blocks - left + 1)
            bounds.append(min(max(round(end_after(begin * size, left) / size), least), greatest))
        return tuple(
            end - begin
            for begin, end in pairwise([*(bound * size for bound in bounds), num_tokens])
        )

    def seconds(self, splits: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds until all replicas have the prefix: [num_splits, p] -> [num_splits].

        A chunk that is empty or too long takes forever (inf); nothing else is checked.
        """
        cost, chunks = self.cost, splits.astype(np.float64)
        before, total = np.cumsum(chunks, axis=1) - chunks, chunks.sum(axis=1, keepdims=True)
        slower = np.maximum(1.0, cost.weights_s / np.maximum(chunks * cost.s_per_token, 1e-30))
        attention_s = chunks * (before + (chunks + 1) / 2) * cost.s_per_pair
        copies_s = total * cost.kv_copy_s_per_token
        seconds = _run(
            chunks * cost.qkv_s_per_token * slower,
            chunks * cost.other_s_per_token * slower + attention_s + copies_s,
            chunks * (cost.kv_bytes_per_token / self.link_bytes_per_s),
            cost.num_layers,
        )
        is_split = (splits.min(axis=1) >= 1) & (splits.max(axis=1) <= self.longest_chunk)
        return np.where(is_split, seconds + cost.step_overhead_s + cost.sampled_token_s, np.inf)


@compiled
def _run(
    projection_s: NDArray[np.float64],
    rest_s: NDArray[np.float64],
    broadcast_s: NDArray[np.float64],
    num_layers: int,
) -> NDArray[np.float64]:
    """The recurrence for each row of [num_splits, p] seconds of a layer."""
    num, p = projection_s.shape
    seconds = np.empty(num)
    done = np.empty(p)
    for row in range(num):
        done[:], sent = 0.0, 0.0
        for _ in range(num_layers):
            for i in range(p):
                projected = done[i] + projection_s[row, i]
                begins = max(projected, sent)
                sent = begins + broadcast_s[row, i]
                done[i] = (begins if i > 0 else projected) + rest_s[row, i]
        seconds[row] = max(done.max(), sent)
    return seconds


def _fit_not_below_zero(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients x >= 0, [3], with `relative` @ x nearest to 1, by trying all supports."""
    least, best = math.inf, np.zeros(3)
    for size in (1, 2, 3):
        for columns in map(list, combinations(range(3), size)):
            values, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)
            error = float(np.sum((relative[:, columns] @ values - 1) ** 2))
            if (values >= 0).all() and error < least:
                least, best = error, np.zeros(3)
                best[columns] = values
    return best
