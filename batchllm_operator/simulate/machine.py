"""The simulated engine, with a model on a GPU, and its scheduling policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from batchllm_operator.cost import BLOCK_SIZE, GPU, EngineLimits, ModelShape, kv_capacity_tokens

ARRIVALS_PER_S: Final = 100.0
"""Requests, for policies with arrivals by time."""


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine on one GPU, or on several that share its work."""

    model: ModelShape
    gpu: GPU
    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int = BLOCK_SIZE
    max_num_batched_tokens: int = 8192
    num_gpus: int = 1
    max_num_seqs: int | None = None
    """Requests that may run at a time; None for the policy's number."""

    @classmethod
    def of(
        cls,
        model: ModelShape,
        gpu: GPU,
        limits: EngineLimits | None = None,
        block_size: int = BLOCK_SIZE,
        *,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
    ) -> Machine:
        """A machine with as many blocks as fit the GPU, unless `num_blocks` says how many.

        Raises `PlanError`: the model leaves no room for KV.
        """
        limits = limits or EngineLimits()
        if num_blocks is None:
            num_blocks = kv_capacity_tokens(model, gpu, limits) // block_size
        most_tokens, num_gpus = limits.max_num_batched_tokens, limits.num_gpus
        return cls(model, gpu, num_blocks, block_size, most_tokens, num_gpus, max_num_seqs)


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to order, admit and schedule requests."""

    name: str
    scheduler: Literal["stock", "batchllm"] = "stock"
    order: Literal["plan", "shuffled"] = "plan"
    arrival: Literal["at_once", "as_fed", "by_batch", "by_time"] = "at_once"
    """as_fed: a few before each step, as `run` feeds its engine.
    by_batch: the next batch arrives when the last request of the previous one has ended.
    by_time: the same, but a batch has the requests that arrived since the last one began."""
    chunked_prefill: bool = True
    prefix_caching: bool = True
    shared_attention: bool = False
    """Whether a step reads a prefix's KV once for all requests that decode with it."""
    max_num_seqs: int = 1024


POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        # A batch runs until its longest output has ended, then the next one.
        Policy("static", arrival="by_batch", chunked_prefill=False, prefix_caching=False),
        # As static, with batches of what has arrived meanwhile.
        Policy("dynamic", arrival="by_time", chunked_prefill=False, prefix_caching=False),
        # A request joins when another has ended; prompts are prefilled whole.
        Policy("continuous", chunked_prefill=False, prefix_caching=False),
        # Continuous, and prompts are cut to fill up the steps of those that decode.
        Policy("chunked_prefill", prefix_caching=False),
        # vLLM as it is: rows as they come, or prompts in the order of the plan.
        Policy("stock_shuffled", order="shuffled"),
        Policy("stock_sorted"),
        # Our scheduler, with vLLM's attention or with shared-prefix attention.
        Policy("batchllm_stock_attention", scheduler="batchllm", arrival="as_fed"),
        Policy("batchllm", scheduler="batchllm", arrival="as_fed", shared_attention=True),
    )
}
"""All policies, oldest first."""
