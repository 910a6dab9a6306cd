"""Cuts the sorted requests into shards, and counts what their engines have to compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from batchllm_operator.cost import BLOCK_SIZE, WorkArrays, prompt_work
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.plan.estimate import Target, work_costs
from batchllm_operator.prefixes import RankedPrompts, Requests, cut_into_shards
from batchllm_operator.spec import JobSpec

_SHARD_S: Final = 120.0
"""Short, so that workers end at about the same time; long beside the second that a claim takes."""
_SHARD_TOKENS: Final = 1e6
"""A 7B model on an A100 takes about two minutes for them, by the roofline."""
_MOST_SHARDS: Final = 1000
"""Unless the spec asks for more: each is a file, which each worker looks up."""


def usual_num_shards(cost: float, target: Target | None) -> int:
    """Shards of a plan whose spec doesn't say how many: each of two minutes, or a million tokens.

    At least 1 and at most 1,000, so those of very large jobs take longer. The number of workers
    doesn't count: it may differ from run to run of one plan.

    Args:
        cost: of all requests, by `work_costs`: nanoseconds of GPUs; without a target, tokens.
        target: the GPU that the cost is for.
    """
    per_shard = _SHARD_TOKENS
    if target is not None:
        per_shard = _SHARD_S * 1e9 * target.balance_limits.num_gpus
    return min(max(math.ceil(cost / per_shard), 1), _MOST_SHARDS)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Requests in lexicographic order, cut into shards.

    Attributes:
        request_idxs: int64 [num_requests], by rank.
        bounds: int64 [num_shards + 1], ranks, from 0 to num_requests; no shard is empty.
        costs: float64 [num_requests], by request, by which shards are balanced.
        shard_costs: float64 [num_shards], their sums.
        work: by rank, with what a shard's engine finds in its cache left out.
        num_optimal_tokens: prefill tokens if there were one shard only.
    """

    request_idxs: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    shard_costs: npt.NDArray[np.float64]
    work: WorkArrays
    num_optimal_tokens: int

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        requests: Requests,
        ranked: RankedPrompts,
        decode_tokens: npt.NDArray[np.int64],
        target: Target | None,
    ) -> Cut:
        """Cut shards of about equal work, where neighbours share little.

        Args:
            ranked: the requests' prompts in order.
            decode_tokens: int64 [num_requests], estimates.
            target: shards are balanced by this GPU's time; None to balance by tokens.
        """
        idxs = ranked.prompt_idxs
        lengths, outputs = requests.lengths[idxs], decode_tokens[idxs]
        # Not the spec's blocks: tuning of the engine must not change shards.
        usual = ranked.cached_tokens(requests.lengths, BLOCK_SIZE)
        costs, cut_costs = work_costs(target, lengths, outputs, usual)
        num_shards = spec.planner.num_shards
        if num_shards is None:
            num_shards = usual_num_shards(float(costs.sum()), target)
        bounds = cut_into_shards(costs, cut_costs, num_shards)
        firsts = bounds[:-1]
        costs[firsts] += cut_costs[firsts]
        del usual, cut_costs  # a plan may have millions of requests
        cached = ranked.cached_tokens(requests.lengths, block_size_of(spec))
        num_optimal = int((lengths - cached).sum())
        cached[firsts] = 0
        by_request = np.empty_like(costs)
        by_request[idxs] = costs
        work = prompt_work(lengths, outputs, cached)
        shard_costs = np.add.reduceat(costs, firsts)
        return cls(idxs, bounds, by_request, shard_costs, work, num_optimal)

    @property
    def shard_of_request(self) -> npt.NDArray[np.int64]:
        """int64 [num_requests], by request."""
        shards = np.empty(len(self.request_idxs), dtype=np.int64)
        shards[self.request_idxs] = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))
        return shards
