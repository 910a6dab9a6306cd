"""Predicts the time of one layer of a prefill on one replica.

Prefilling a chunk of c tokens after s others takes, in each layer,

    matrices_s  = max(c * (qkv_s_per_token + other_s_per_token), weights_s)
    attention_s = pairs * s_per_pair
    copies_s    = copied tokens * kv_copy_s_per_token

but at least `overhead_s`, the host's time to launch a layer. A *pair* is a token and one that it
attends to. A causal kernel computes c * s + c * (c + 1) / 2 of them. Dense products under a mask
compute c * (s + c): the rectangles of the KV-Runahead paper (Cho et al., *KV-Runahead: Scalable
Causal LLM Inference by Parallel Key-Value Cache Generation*, Fig. 2 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

import numpy as np

from batchllm_operator.cost.gpu import GPU
from batchllm_operator.cost.model_shape import ModelShape
from batchllm_operator.errors import PlanError

_MAY_NOT_BE_ZERO = ("num_layers", "qkv_s_per_token", "other_s_per_token", "kv_bytes_per_token")


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """Seconds and bytes on one replica, of one layer unless noted.

    Raises:
        PlanError: a value isn't finite, is below 0, or is 0 where it must be positive.
    """

    num_layers: int
    qkv_s_per_token: float
    """To project a token to its query, key and value, which doesn't need the KV of earlier
    tokens."""
    other_s_per_token: float
    """For a token's other matrices: the attention's output and the MLP."""
    s_per_pair: float
    """For attention, over all heads."""
    kv_bytes_per_token: float
    weights_s: float = 0.0
    """To read the layer's weights: the least time of its matrices."""
    read_s_per_token: float = 0.0
    """To read the KV of one token, in decoding."""
    kv_copy_s_per_token: float = 0.0
    """To copy the KV of one token into or out of its block, around a transfer."""
    overhead_s: float = 0.0
    """The least time of a layer: the host launches its kernels."""
    step_overhead_s: float = 0.0
    """For a whole engine step."""
    sampled_token_s: float = 0.0
    """For the head, per sampled token of a whole step."""
    computes_masked_pairs: bool = False
    """Whether attention also computes masked pairs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_zero = field.name not in _MAY_NOT_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
                raise PlanError(
                    f"cost of a replica: {field.name} must be finite and"
                    f" {'not below' if least_is_zero else 'above'} 0, not {value}"
                )

    @classmethod
    def of(
        cls,
        model: ModelShape,
        gpu: GPU,
        *,
        layer_overhead_s: float = 0.0,
        computes_masked_pairs: bool = False,
        score_bytes: float = 0.0,
    ) -> ReplicaCost:
        """A replica on one GPU, by the same roofline as `planner.cost.roofline`.

        Args:
            layer_overhead_s: see `overhead_s`.
            computes_masked_pairs: see the attribute.
            score_bytes: memory traffic per pair and head, for attention that keeps its scores in
                memory between products, mask and softmax; 0 for fused kernels.
        """
        qkv = model.hidden_size * model.head_size * (model.num_heads + 2 * model.num_kv_heads)
        pair_flop = model.flop_per_pair / model.num_layers
        kv_bytes = model.kv_bytes_per_token / model.num_layers
        return cls(
            num_layers=model.num_layers,
            qkv_s_per_token=2 * qkv / gpu.flop_per_s,
            other_s_per_token=2 * (model.num_layer_weights - qkv) / gpu.flop_per_s,
            s_per_pair=pair_flop / gpu.flop_per_s + model.num_heads * score_bytes / gpu.bytes_per_s,
            kv_bytes_per_token=kv_bytes,
            weights_s=model.num_layer_weights * model.bytes_per_weight / gpu.bytes_per_s,
            read_s_per_token=kv_bytes / gpu.bytes_per_s,
            kv_copy_s_per_token=2 * kv_bytes / gpu.bytes_per_s,
            overhead_s=layer_overhead_s,
            step_overhead_s=gpu.step_overhead_s,
            sampled_token_s=model.flop_per_sampled_token / gpu.flop_per_s,
            computes_masked_pairs=computes_masked_pairs,
        )

    def pairs(self, num_tokens: int, num_before: int = 0) -> float:
        """Pairs that attention computes for a chunk of `num_tokens` after `num_before` others."""
        own = num_tokens if self.computes_masked_pairs else (num_tokens + 1) / 2
        return num_tokens * (num_before + own)

    def chunk_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of a step that prefills `num_tokens` after `num_before` cached ones."""
        matrices_s = max(
            num_tokens * (self.qkv_s_per_token + self.other_s_per_token), self.weights_s
        )
        layer_s = matrices_s + self.pairs(num_tokens, num_before) * self.s_per_pair
        return (
            self.num_layers * max(layer_s, self.overhead_s)
            + self.step_overhead_s
            + self.sampled_token_s
        )

    def prefill_seconds(self, num_tokens: int, *, max_step_tokens: int | None = None) -> float:
        """Seconds to prefill `num_tokens` alone on a replica, in steps of `max_step_tokens`."""
        step = max_step_tokens or max(num_tokens, 1)
        starts = range(0, num_tokens, step)
        return sum(self.chunk_seconds(min(step, num_tokens - start), start) for start in starts)

    def calibrated(self, steps: Sequence[tuple[int, int, float]]) -> ReplicaCost:
        """The same with rates fitted to measured prefill steps.

        Fits seconds per step, token and pair, none below 0, by least squares on relative errors.
        QKV keeps its share of a token's matrices; the weights and the layers' overheads become part
        of the step's.

        Args:
            steps: (tokens of the chunk, tokens before it, seconds) of each.

        Raises:
            PlanError: fewer than three steps of different sizes, or times that don't grow with
                tokens.
        """
        if len({(chunk, before) for chunk, before, _ in steps}) < 3:
            raise PlanError("cost of a replica: a fit takes three measured steps of different size")
        seconds = np.array([each for _, _, each in steps])
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise PlanError("cost of a replica: measured steps must take more than 0 seconds")
        sizes = np.array([[1.0, chunk, self.pairs(chunk, before)] for chunk, before, _ in steps])
        step_s, token_s, pair_s = _fit_not_below_zero(sizes / seconds[:, np.newaxis])
        if token_s <= 0:
            raise PlanError("cost of a replica: the measured steps don't grow with their tokens")
        qkv_share = self.qkv_s_per_token / (self.qkv_s_per_token + self.other_s_per_token)
        return replace(
            self,
            qkv_s_per_token=token_s * qkv_share / self.num_layers,
            other_s_per_token=token_s * (1 - qkv_share) / self.num_layers,
            s_per_pair=pair_s / self.num_layers,
            weights_s=0.0,
            overhead_s=0.0,
            step_overhead_s=step_s,
            sampled_token_s=0.0,
        )


def _fit_not_below_zero(relative: np.ndarray) -> tuple[float, float, float]:
    """Coefficients x >= 0, [3], with `relative` @ x nearest to 1, by trying all supports."""
    best, found = math.inf, np.zeros(3)
    for size in (1, 2, 3):
        for support in combinations(range(3), size):
            columns = list(support)
            values, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(relative)), rcond=None)
            error = float(np.sum((relative[:, columns] @ values - 1) ** 2))
            if (values >= 0).all() and error < best:
                best, found = error, np.zeros(3)
                found[columns] = values
    return float(found[0]), float(found[1]), float(found[2])
