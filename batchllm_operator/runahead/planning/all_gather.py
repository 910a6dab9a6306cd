"""Tensor and sequence parallelism with an all-gather (TSP): the paper's baseline.

Each of p processes has an equal chunk. In each layer it projects its tokens, all exchange their
keys and values, and each attends with its own queries (Cho et al., Sec. 4.1, Fig. 4):

    layer_s = qkv_s + gather_s + attention_s + other_s, no less than launching it takes
    gather_s = (p - 1) / p * C * bytes / bandwidth
    TTFT     = L * layer_s + step overhead + head

All wait for each other in each layer, so the slowest one counts: with dense products under a mask
all are equal, with C / p * C pairs; with a causal kernel it is the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning.replica_cost import ReplicaCost


@dataclass(frozen=True, slots=True)
class AllGather:
    """A collective among all processes.

    Raises:
        PlanError: a value isn't finite or is out of its range.
    """

    bytes_per_s: float
    """Mean rate at which each process receives."""
    overhead_s: float = 0.0
    """Of each operation on the host, in addition to launching the layer."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise PlanError(f"all-gather: bytes_per_s must be above 0, not {self.bytes_per_s}")
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise PlanError(f"all-gather: overhead_s must not be below 0: {self.overhead_s}")


def all_gather_ttft(
    cost: ReplicaCost, gather: AllGather, num_tokens: int, num_replicas: int
) -> float:
    """TTFT of a prefix of `num_tokens`, in seconds.

    Raises:
        PlanError: there are fewer tokens than processes.
    """
    if not 1 <= num_replicas <= num_tokens:
        raise PlanError(f"all-gather: {num_tokens} tokens are too few for {num_replicas} processes")
    if num_replicas == 1:
        return cost.chunk_seconds(num_tokens)
    chunk = -(-num_tokens // num_replicas)
    others = num_tokens - chunk
    matrices_s = max(chunk * (cost.qkv_s_per_token + cost.other_s_per_token), cost.weights_s)
    layer_s = (
        matrices_s
        + others * cost.kv_bytes_per_token / gather.bytes_per_s
        + num_tokens * cost.kv_copy_s_per_token
        + cost.pairs(chunk, others) * cost.s_per_pair
    )
    least_s = cost.overhead_s + gather.overhead_s
    return cost.num_layers * max(layer_s, least_s) + cost.step_overhead_s + cost.sampled_token_s
