"""Requests to simulate: a shard of a plan, or made-up ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes import TokenTable, optimal_saving_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order of their plan, with groups side by side.

    Attributes:
        tokens: the prompts.
        group_ids: [n] int64; requests with the same id share a prefix.
        num_prefix_tokens: [n] int64, tokens that each shares with its group.
        output_tokens: [n] int64, tokens that each generates.
        estimated_tokens: [n] int64, the scheduler's estimate of that.
        max_output_tokens: the limit given to the scheduler; None for the estimates, where they are
            correct.
    """

    name: str
    tokens: TokenTable
    group_ids: NDArray[np.int64]
    num_prefix_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    estimated_tokens: NDArray[np.int64]
    max_output_tokens: int | None = None

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.tokens)

    @property
    def group_sizes(self) -> NDArray[np.int64]:
        """Requests in the group of each request: [n]."""
        _, inverse, counts = np.unique(self.group_ids, return_inverse=True, return_counts=True)
        return np.asarray(counts[inverse], dtype=np.int64)

    def optimal_saving_ratio(self, block_size: int) -> float:
        """The saving ratio of one engine with unbounded memory."""
        return optimal_saving_ratio(self.tokens, block_size, merge=[False])

    def with_estimate_error(self, share: float, seed: int = 0) -> Workload:
        """The same with random errors of the estimates, up to a share of the output."""
        if share == 0:
            return self
        factors = np.random.default_rng(seed).uniform(1 - share, 1 + share, len(self))
        estimates = np.maximum(np.rint(self.output_tokens * factors), 1)
        return replace(self, estimated_tokens=estimates.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Shape:
    """A made-up workload: an instruction, then documents with several questions each."""

    name: str
    num_requests: int
    share_degree: float
    """Requests per document, on average."""
    prefix_tokens: int
    """Tokens of a document; 0 for none."""
    distinct_tokens: int
    output_tokens: int
    instruction_tokens: int = 0
    spread: float = 0.15
    """Lengths of documents and questions vary uniformly by this share, up and down."""

    def make(self, seed: int = 0, vocabulary: int = 32_000) -> Workload:
        """The requests, document by document."""
        generator = np.random.default_rng(seed)

        def tokens(mean: int) -> NDArray[np.int32]:
            low, high = round(mean * (1 - self.spread)), round(mean * (1 + self.spread))
            size = generator.integers(low, high + 1)
            return generator.integers(0, vocabulary, size, dtype=np.int32)

        instruction = generator.integers(0, vocabulary, self.instruction_tokens, dtype=np.int32)
        document_idxs = np.arange(self.num_requests) / self.share_degree
        group_ids = document_idxs.astype(np.int64)
        prompts, prefixes = [], np.zeros(self.num_requests, dtype=np.int64)
        prefix = instruction
        for idx, group_id in enumerate(group_ids):
            if idx == 0 or group_id != group_ids[idx - 1]:
                prefix = np.concatenate([instruction, tokens(self.prefix_tokens)])
            prompts.append(np.concatenate([prefix, tokens(self.distinct_tokens)]))
            prefixes[idx] = len(prefix)
        outputs = np.full(self.num_requests, self.output_tokens, dtype=np.int64)
        return Workload(
            self.name, TokenTable.from_lists(prompts), group_ids, prefixes, outputs, outputs
        )
